//! Configurations that `longshored` refuses at its start.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt, process::Command};

/// Returns the error of a server with this environment variable. Another variable there is no UTF-8.
fn refused(variable: &str, value: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longshored"));
    command.env("OTHER", OsStr::from_bytes(b"\xff")).env(variable, value);
    let ended = command.output().unwrap();
    let error = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(2), "{error}");
    error
}

#[test]
fn a_wrong_value_of_a_variable_names_the_variable() {
    let error = refused("LONGSHORED_MEMORY", "foo");
    assert!(error.contains("'--memory <SIZE> (LONGSHORED_MEMORY)'"), "{error}");
    assert!(refused("LONGSHORED_THREADS", "0").contains("threads is 0"));
}
