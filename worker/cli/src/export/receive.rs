//! All servers' streams are read at once, and each message is checked and written as it comes.

use std::{sync::Mutex, thread};

use longshore_proto::{
    Fault, FaultKind, Layout, Placement, ServerId, ShardId, Version, checksum::crc32, limits::CHUNK_BYTES,
};
use longshore_wire::{
    dtype_to_wire, fault_from_status,
    v1::{self, admin_client::AdminClient},
};
use tokio::runtime::Handle;
use tonic::transport::Channel;

use super::{files::Files, settings::Settings};
use crate::servers::Servers;

/// How much longer than its own deadline a server may be silent.
const GRACE: std::time::Duration = std::time::Duration::from_secs(30);

struct Job<'a> {
    settings: &'a Settings,
    version: Version,
    layout: &'a Layout,
    files: &'a Files,
}

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
    let job = Job { settings, version, layout, files };
    let first = Mutex::new(None);
    thread::scope(|scope| {
        for (index, server) in servers.list().iter().enumerate() {
            let (job, first) = (&job, &first);
            let owned = placement.owned(ServerId(index as u32));
            scope.spawn(move || {
                let received =
                    job.receive_from(servers.handle(), &server.address, server.admin.clone(), &owned);
                if let Err(fault) = received {
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

fn broken(address: &str, value: String, limit: impl std::fmt::Display) -> Fault {
    let remedy = "run the server's version of longshore, and name the servers in the job's order";
    Fault::new(FaultKind::Corrupt, "export", format!("{value} from {address}"), limit, remedy)
}

impl Job<'_> {
    fn receive_from(
        &self,
        runtime: &Handle,
        address: &str,
        mut admin: AdminClient<Channel>,
        owned: &[ShardId],
    ) -> Result<(), Fault> {
        let patience = self.settings.deadline + GRACE;
        let silent = || {
            let limit = format!("a message within {} s", patience.as_secs());
            Fault::new(
                FaultKind::Deadline,
                "export",
                format!("{address}, silent"),
                limit,
                "look at that server's log",
            )
        };
        let refused = |status: tonic::Status| fault_from_status(&status, address);
        let request = v1::ExportRequest {
            job: self.settings.job.clone(),
            version: self.version.0,
            dtype: dtype_to_wire(self.settings.dtype),
            deadline_ms: self.settings.deadline.as_millis() as u64,
        };
        let within = |call| runtime.block_on(async { tokio::time::timeout(patience, call).await });
        let answer = within(admin.export(request)).map_err(|_| silent())?;
        let mut stream = answer.map_err(refused)?.into_inner();
        // How many elements of each owned shard were received. They come from its start on.
        let mut received = vec![0; owned.len()];
        loop {
            let message = runtime.block_on(async { tokio::time::timeout(patience, stream.message()).await });
            let Some(message) = message.map_err(|_| silent())?.map_err(refused)? else {
                let remedy = "export to a faster disk, or look at that server's log";
                let value = format!("{address}, which ended early");
                return Err(Fault::new(FaultKind::Unavailable, "export", value, "whole", remedy));
            };
            if message.end {
                return self.check_end(address, &message, owned, &received);
            }
            self.take(address, &message, owned, &mut received)?;
        }
    }

    fn take(
        &self,
        address: &str,
        message: &v1::ExportResponse,
        owned: &[ShardId],
        received: &mut [u64],
    ) -> Result<(), Fault> {
        let shard = ShardId(message.shard);
        let Ok(index) = owned.binary_search(&shard) else {
            return Err(broken(address, shard.to_string(), "a shard of this server"));
        };
        let size = self.settings.dtype.bytes();
        let elements = message.payload.len() as u64 / size;
        let room = self.layout.shard_len(shard) - received[index];
        let fits = !message.payload.is_empty()
            && message.payload.len() <= CHUNK_BYTES
            && (message.payload.len() as u64).is_multiple_of(size)
            && message.offset == received[index]
            && elements <= room;
        if !fits {
            let value = format!("{} bytes at {} of {shard}", message.payload.len(), message.offset);
            let limit = format!("at most {room} elements at {}", received[index]);
            return Err(broken(address, value, limit));
        }
        let found = crc32(&message.payload);
        if found != message.crc32 {
            let value = format!("checksum {found:08x} of {shard} at {}", message.offset);
            return Err(broken(address, value, format!("{:08x}, as was sent", message.crc32)));
        }
        received[index] += elements;
        self.files.write(self.layout.shard_range(shard).start + message.offset, &message.payload)
    }

    fn check_end(
        &self,
        address: &str,
        message: &v1::ExportResponse,
        owned: &[ShardId],
        received: &[u64],
    ) -> Result<(), Fault> {
        if message.version != self.version.0 {
            // Asked for version 0, a server gives its current one.
            let remedy = "export again: training has begun meanwhile";
            return Err(Fault::new(
                FaultKind::Precondition,
                "version",
                message.version,
                self.version,
                remedy,
            ));
        }
        let missing = owned.iter().zip(received).find(|(shard, got)| **got != self.layout.shard_len(**shard));
        missing.map_or(Ok(()), |(shard, got)| {
            Err(broken(address, format!("{got} elements of {shard}"), self.layout.shard_len(*shard)))
        })
    }
}
