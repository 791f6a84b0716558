//! End-to-end tests as one program, so that one build links the harness and the libraries once.
//!
//! `tests/runner.py` runs each test in its own process, and modules that measure one test at a time.

mod bad_input;
mod bad_storage;
mod bench;
mod book;
mod chart;
mod checkpoints;
mod cli;
mod commands;
mod container;
mod device;
mod doctor;
mod drain;
mod errors;
mod export;
mod floods;
mod http;
mod import;
mod inspect;
mod kills;
mod large;
mod links;
mod memory;
mod monitoring;
mod output;
mod overflow;
mod packages;
mod page;
mod replicas;
mod restore;
mod right_bits;
mod rooms;
mod same_bits;
mod scale;
mod secure;
mod slurm;
mod stock_client;
mod stopped;
mod top;
