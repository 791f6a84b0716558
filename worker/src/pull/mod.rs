//! The way of weights: one version's image is pulled over several connections into pooled host memory, and can be
//! read as it arrives.

mod arriving;
mod feed;
mod fetch;
mod pulls;
mod reading;
mod store;
mod turns;

pub use feed::{Feed, Lent};
pub(crate) use pulls::Pulls;
pub(crate) use reading::Reading;
