//! All servers' streams are read at once, and each message is written as it comes.

use std::{
    sync::{Mutex, PoisonError},
    thread,
};

use longshore_proto::{Dtype, Fault, JobSpec, Layout, Placement, ServerId, StateArray, Version};
use longshore_worker::{
    convert,
    export::{Contents, Export},
};

use super::{files::Files, optimizer::Optimizer, settings::Settings, universal::Universal};
use crate::{progress::Progress, servers::Servers, torch::moments};

/// Where what is received goes.
pub(super) enum Sinks {
    Safetensors { files: Files, optimizer: Option<Optimizer> },
    Universal(Universal),
}

impl Sinks {
    fn write(&self, array: StateArray, at: u64, bytes: &[u8]) -> Result<(), Fault> {
        let (files, optimizer) = match self {
            Sinks::Safetensors { files, optimizer } => (files, optimizer),
            Sinks::Universal(universal) => return universal.write(array, at, bytes),
        };
        let dtype = files.dtype();
        match optimizer {
            Some(optimizer) if array != StateArray::Master => optimizer.write(array, at, bytes),
            // All state comes in fp32.
            Some(_) if dtype != Dtype::F32 => {
                let mut values = vec![0.0; bytes.len() / size_of::<f32>()];
                convert::to_f32(Dtype::F32, bytes, &mut values);
                let mut rounded = vec![0; values.len() * dtype.bytes() as usize];
                convert::from_f32(dtype, &values, &mut rounded);
                files.write(at, &rounded)
            }
            _ => files.write(at, bytes),
        }
    }
}

/// Writes one version of all servers' shards. Returns how many updates made it.
pub(super) fn receive(
    servers: &Servers,
    settings: &Settings,
    version: Version,
    (spec, layout, placement): (&JobSpec, &Layout, &Placement),
    sinks: &Sinks,
) -> Result<u64, Fault> {
    check_servers(servers, placement)?;
    let contents = settings.format.contents(spec.rule);
    let export = Export { job: &settings.job, version, contents, layout, deadline: settings.deadline };
    let received = Mutex::new(Ok(0));
    let progress = Progress::bytes("exporting", bytes(contents, layout), settings.shown);
    let progress = &progress;
    thread::scope(|scope| {
        for (index, server) in servers.list().iter().enumerate() {
            let (export, all) = (&export, &received);
            let owned = placement.owned(ServerId(index as u32));
            scope.spawn(move || {
                let write = |array, at, bytes: &[u8]| {
                    progress.add(bytes.len() as u64);
                    sinks.write(array, at, bytes)
                };
                let received = export.receive(&server.address, server.admin.clone(), &owned, &write);
                let received = servers.handle().block_on(received);
                // The first fault is the cause, and the others may be its consequence.
                let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                if all.is_ok() {
                    *all = received;
                }
            });
        }
    });
    received.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// What comes from all servers together, padding included.
fn bytes(contents: Contents, layout: &Layout) -> u64 {
    let element = match contents {
        Contents::Weights(dtype) => dtype.bytes(),
        Contents::State(rule) => (1 + moments(rule).len() as u64) * Dtype::F32.bytes(),
    };
    layout.elements() * element
}

fn check_servers(servers: &Servers, placement: &Placement) -> Result<(), Fault> {
    let (given, needed) = (servers.list().len(), placement.servers.len());
    if given == needed {
        return Ok(());
    }
    let remedy = format!("name all of them, in their order: {}", placement.servers.join(","));
    Err(Fault::invalid("--servers", format!("{given} servers"), format!("the job's {needed}"), remedy))
}
