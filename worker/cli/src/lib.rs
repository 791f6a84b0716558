//! What `longshore` does: the trainer, the operator's commands, the export and import of weights, the benches.
//!
//! Beside the worker library it links the server, to embed one where a run names none.

#[macro_use]
mod say;

mod bench;
pub mod commands;
mod entry;
mod export;
mod import;
mod plan;
mod servers;
mod sizes;
mod tls;
mod torch;
pub mod train;

pub use entry::run;
