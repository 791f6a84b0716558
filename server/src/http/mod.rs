//! The HTTP address: metrics for Prometheus, health for orchestrators, and a status page for people. All requests are
//! read-only.

mod answers;
mod listen;
mod metrics;
mod report;
mod seen;

pub(crate) use self::{listen::serve, report::Listen};
