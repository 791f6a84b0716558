//! What `longshore` does: the trainer, the operator's commands, the export and import of weights, the benches.
//!
//! Beside the worker library it links the server, to embed one where a run names none.

#[macro_use]
mod output;

mod access;
mod bench;
mod clusters;
pub mod commands;
mod doctor;
mod entry;
mod export;
mod import;
mod plan;
mod progress;
mod servers;
mod sizes;
mod tls;
mod top;
pub mod train;
mod wrong_use;

pub use access::Access;
pub use entry::run;
