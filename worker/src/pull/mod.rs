//! Pulls weights: one version's image arrives over several connections in pooled host memory, and is read as it
//! arrives.

mod feed;
mod fetch;
mod pulls;
mod store;
mod turns;

pub use feed::{Feed, Lent};
pub(crate) use pulls::{Pulls, Reading};
