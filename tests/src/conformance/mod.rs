//! Shared by conformance tests: servers in the test's process, runs through the worker library, and a
//! reference loop. The loop shares only the scalar kernels with the engine.

pub mod cluster;
pub mod files;
pub mod gpt;
pub mod raw;
pub mod reference;
pub mod run;
pub mod scenario;
pub mod synthetic;
