//! All servers' streams are read at once, and each message is written as it comes.

use std::{sync::Mutex, thread};

use longshore_proto::{Fault, Layout, Placement, ServerId, Version};
use longshore_worker::export::{Contents, Export};

use super::{files::Files, settings::Settings};
use crate::servers::Servers;

/// Writes one version of all servers' shards.
pub(super) fn receive(
    servers: &Servers,
    settings: &Settings,
    version: Version,
    layout: &Layout,
    placement: &Placement,
    files: &Files,
) -> Result<(), Fault> {
    check_servers(servers, placement)?;
    let contents = Contents::Weights(settings.dtype);
    let export = Export { job: &settings.job, version, contents, layout, deadline: settings.deadline };
    let first = Mutex::new(None);
    thread::scope(|scope| {
        for (index, server) in servers.list().iter().enumerate() {
            let (export, first) = (&export, &first);
            let owned = placement.owned(ServerId(index as u32));
            scope.spawn(move || {
                let write = |_, at, bytes: &[u8]| files.write(at, bytes);
                let received = export.receive(&server.address, server.admin.clone(), &owned, &write);
                if let Err(fault) = servers.handle().block_on(received) {
                    // The first fault is the cause, and the others may be its consequence.
                    first.lock().unwrap_or_else(std::sync::PoisonError::into_inner).get_or_insert(fault);
                }
            });
        }
    });
    first.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner).map_or(Ok(()), Err)
}

fn check_servers(servers: &Servers, placement: &Placement) -> Result<(), Fault> {
    let (given, needed) = (servers.list().len(), placement.servers.len());
    if given == needed {
        return Ok(());
    }
    let remedy = format!("name all of them, in their order: {}", placement.servers.join(","));
    Err(Fault::invalid("--servers", format!("{given} servers"), format!("the job's {needed}"), remedy))
}
