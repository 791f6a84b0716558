//! Shared by conformance tests: servers in the test's process, runs through the worker library, and a
//! reference loop. The loop shares no code with the engine, so a test passes wrongly only if both are wrong
//! in the same way.

pub mod cluster;
pub mod files;
pub mod gpt;
pub mod raw;
pub mod reference;
pub mod run;
pub mod scenario;
pub mod synthetic;
