//! Harness for end-to-end tests: starts the real binaries, reads their output, and kills them when the test
//! ends.

pub mod binaries;
pub mod browser;
pub mod command;
pub mod conformance;
pub mod corpus;
pub mod event;
pub mod http;
pub mod links;
pub mod peer;
pub mod process;
pub mod proxy;
pub mod seccomp;
pub mod seed;
pub mod server;
pub mod skip;
pub mod soak;
pub mod status;
pub mod stock;
pub mod terminal;
pub mod tls;
pub mod train;
pub mod undecided;
pub mod undisturbed;
