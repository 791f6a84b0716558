//! The mark in a folder of a job that idled and gave its memory back, so that a server that starts leaves it closed.

use std::{
    fs::{self, OpenOptions},
    io::ErrorKind,
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use longshore_proto::Fault;

use super::{fault::io, folder::sync};

/// An empty file. Only that it is there counts.
const MARK: &str = "evicted";

pub(super) fn is_marked(folder: &Path) -> bool {
    folder.join(MARK).exists()
}

pub(super) fn mark(folder: &Path) -> Result<(), Fault> {
    let mark = folder.join(MARK);
    let written = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&mark);
    written.and_then(|_| sync(folder)).map_err(io("write", &mark))
}

/// A missing mark is no error.
pub(super) fn unmark(folder: &Path) -> Result<(), Fault> {
    let mark = folder.join(MARK);
    match fs::remove_file(&mark).and_then(|()| sync(folder)) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(io("remove", &mark)(error)),
        _ => Ok(()),
    }
}
