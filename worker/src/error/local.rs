//! Failures of this side alone: no server was asked.

use longshore_proto::Fault;

/// An unusable option or argument. Nothing was sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub Fault);

/// A gradient that does not match the layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GradientError {
    #[error(
        "there is no parameter {param}: the job has {params}; register parameters before opening the job"
    )]
    Unknown { param: usize, params: usize },
    #[error(
        "the gradient of {name} has {given} elements, the parameter has {expected}: push the whole gradient"
    )]
    Length { name: String, given: u64, expected: u64 },
    #[error(
        "the gradient of {name} was put twice in one micro-step: sum it first, a weight used twice is one parameter"
    )]
    Twice { name: String },
    #[error(
        "{missing} parameters have no gradient, the first is {name}: put zeros for parameters without a gradient"
    )]
    Missing { name: String, missing: usize },
    #[error(
        "rank {rank} put the gradient of {name}, whose partition it does not contribute to: put only gradients of the \
         rank's own partitions (spec.partitions)"
    )]
    NotContributor { name: String, rank: u32 },
    #[error(
        "rank {rank} put the gradient of {name}, which is frozen (spec.partitions): put no gradient of it, or open a job in \
         which it is trained"
    )]
    Frozen { name: String, rank: u32 },
}

/// An allocation or reservation beyond a memory budget.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{device} has no room for {field}: asked {asked} bytes, free {free} of a budget of {budget}: {remedy}"
)]
pub struct Shortage {
    pub device: String,
    pub field: String,
    pub asked: u64,
    pub free: u64,
    pub budget: u64,
    pub remedy: &'static str,
}

/// A device's driver failed, or there is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{device}: {call} failed: {cause}: {remedy}")]
pub struct DeviceError {
    pub device: String,
    pub call: &'static str,
    pub cause: String,
    pub remedy: &'static str,
}

/// The library was called in the wrong order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Misuse(pub &'static str);

/// This machine refused a resource that the library needs.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{what} failed: {cause}: {remedy}")]
pub struct Environment {
    pub what: &'static str,
    pub cause: String,
    pub remedy: &'static str,
}
