//! What the sources say of their own structure, read without a compiler.

mod circles;
mod resolve;
mod source;
#[cfg(test)]
mod tests;

pub use circles::{Arrow, Arrows, OWN_FILE, arrows, circles};
