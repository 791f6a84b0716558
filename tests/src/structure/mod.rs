//! Reads from the sources, without a compiler, which file uses which, and finds circles among them.

mod circles;
mod resolve;
mod source;
#[cfg(test)]
mod tests;

pub use circles::{Arrow, Arrows, OWN_FILE, arrows, circles};
