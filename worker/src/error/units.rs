//! Failures of stage 3's use of units. Each names the unit.

use longshore_proto::Version;

use super::GradientError;

/// A unit that was used in another way than units can be. Nothing was sent or changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    #[error("there is no unit {unit}: the model is divided into {units}; count units from 0")]
    Unknown { unit: usize, units: usize },
    #[error("unit {unit} has no parameters: leave it out, or name its parameters")]
    Empty { unit: String },
    #[error(
        "unit {unit} names parameter {param}, and the job has {params}; take indices from the job's layout"
    )]
    NoSuchParameter { unit: String, param: usize, params: usize },
    #[error(
        "parameter {param} is in units {first} and {second}: a parameter belongs to one unit; give a shared one a unit \
         of its own"
    )]
    Shared { param: String, first: String, second: String },
    #[error(
        "parameter {param} is in no unit: each trained parameter needs one, by which its gradient leaves; add it to a unit"
    )]
    Uncovered { param: String },
    #[error(
        "unit {unit} takes {bytes} bytes and the budget for weights is {budget}: raise the budget to {bytes} bytes at \
         least, or divide the unit"
    )]
    TooLarge { unit: String, bytes: u64, budget: u64 },
    #[error(
        "unit {unit} takes {bytes} bytes, and the units that are acquired take {held} of a budget of {budget}: release \
         one before, or raise the budget"
    )]
    NoRoom { unit: String, bytes: u64, held: u64, budget: u64 },
    #[error(
        "unit {unit} was acquired twice: use the weights in hand, or release them before acquiring it again"
    )]
    AcquiredTwice { unit: String },
    #[error("unit {unit} is not acquired: acquire it first, and release it once")]
    NotAcquired { unit: String },
    #[error(
        "unit {unit} is still acquired, with {held}, and {wanted} is to be read now: release every unit before the \
         micro-step ends"
    )]
    VersionChanged { unit: String, held: Version, wanted: Version },
    #[error(
        "a gradient of parameter {param} was emitted for unit {unit}, which does not have it: emit it for its own unit"
    )]
    OtherUnit { unit: String, param: usize },
    #[error("unit {unit}: {source}")]
    Gradient { unit: String, source: GradientError },
}
