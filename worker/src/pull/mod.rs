//! The way of weights: one version's image, pulled over several connections into pooled host memory, readable as it
//! arrives.

mod feed;
mod fetch;
mod pulls;
mod reading;
mod store;

pub use feed::Feed;
pub(crate) use pulls::Pulls;
pub(crate) use reading::Reading;
