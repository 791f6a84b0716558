//! The command line `longshore`: trainer, operators' commands, export and import of weights, benches.
//!
//! The crate links the server too, and embeds one in runs that name no server.

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
mod speeds;
mod tls;
mod top;
pub mod train;

pub use access::Access;
pub use entry::run;
