//! What conformance tests share: servers inside the test, runs through the worker library, and a plain loop that says
//! what they must compute. The loop shares no code with the engine, so a test passes wrongly only if both are wrong
//! in the same way.

pub mod cluster;
pub mod files;
pub mod gpt;
pub mod raw;
pub mod reference;
pub mod run;
pub mod scenario;
pub mod synthetic;
