//! The HTTP address: metrics for Prometheus, health for orchestrators, and a status page for people. It changes nothing.

mod answers;
mod drives;
mod families;
mod listen;
mod metrics;
mod report;
mod seen;

pub(crate) use self::listen::serve;
