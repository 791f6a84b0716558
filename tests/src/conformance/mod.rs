//! What conformance tests share: servers inside the test, runs through the worker library, and a plain loop that says
//! what they must compute. The loop shares no code with the engine, so both must be wrong alike for a test to pass
//! wrongly.

pub mod cluster;
pub mod files;
pub mod gpt;
pub mod plan;
pub mod raw;
pub mod reference;
pub mod run;
pub mod synthetic;
