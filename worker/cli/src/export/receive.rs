//! Reads the streams of all servers at once, and writes each message when it arrives.

use std::{
    sync::{Mutex, PoisonError},
    thread,
};

use longshore_proto::{Dtype, Fault, Layout, Placement, ServerId, Version};
use longshore_worker::export::{Contents, Export};

use super::{Settings, files::Files};
use crate::{progress::Progress, servers::Servers};

/// Writes one version of all servers' shards.
pub(super) fn receive(
    servers: &Servers,
    settings: &Settings,
    (version, dtype): (Version, Dtype),
    (layout, placement): (&Layout, &Placement),
    files: &Files,
) -> Result<(), Fault> {
    check_servers(servers, placement)?;
    let contents = Contents::Weights(dtype);
    let export = Export { job: &settings.job, version, contents, layout, deadline: settings.deadline };
    let received = Mutex::new(Ok(()));
    // Includes the padding between parameters, which is sent too.
    let bytes = layout.elements() * dtype.bytes();
    let progress = Progress::bytes("exporting", bytes, settings.shown);
    let progress = &progress;
    thread::scope(|scope| {
        for (index, server) in servers.list().iter().enumerate() {
            let (export, all) = (&export, &received);
            let owned = placement.owned(ServerId(index as u32));
            scope.spawn(move || {
                let write = |_, at, bytes: &[u8]| {
                    progress.add(bytes.len() as u64);
                    files.write(at, bytes)
                };
                let received = export.receive(&server.address, server.admin.clone(), &owned, &write);
                let received = servers.handle().block_on(received);
                // The first fault is the cause; others may be its consequences.
                let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                if all.is_ok() {
                    *all = received.map(drop);
                }
            });
        }
    });
    received.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn check_servers(servers: &Servers, placement: &Placement) -> Result<(), Fault> {
    let (given, needed) = (servers.list().len(), placement.servers.len());
    if given == needed {
        return Ok(());
    }
    let remedy = format!("name all of them, in their order: {}", placement.servers.join(","));
    Err(Fault::invalid("--servers", format!("{given} servers"), format!("the job's {needed}"), remedy))
}
