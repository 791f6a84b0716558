//! Receives one server's part of an export, and checks it: a version's weights, or all of its state. Called by
//! `session::export` for all servers at once.

use std::time::Duration;

use longshore_proto::{
    Dtype, Fault, FaultKind, Layout, Rule, ServerId, ShardId, StateArray, Version, checksum::crc32,
    limits::CHUNK_BYTES,
};
use longshore_wire::{
    Channel, array_from_wire, dtype_to_wire, fault_from_status,
    v1::{self, admin_client::AdminClient},
};

use crate::host;

/// Time beyond the export's deadline for which a server may be silent.
const GRACE: Duration = Duration::from_secs(30);

/// The contents of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// The master weights, rounded to this element type.
    Weights(Dtype),
    /// Every array of the rule, in fp32.
    State(Rule),
}

impl Contents {
    pub fn dtype(self) -> Dtype {
        match self {
            Contents::Weights(dtype) => dtype,
            Contents::State(_) => Dtype::F32,
        }
    }

    pub fn arrays(self) -> &'static [StateArray] {
        match self {
            Contents::Weights(_) => &[StateArray::Master],
            Contents::State(rule) => StateArray::of(rule),
        }
    }
}

/// A request for one version of a job.
pub struct Export<'a> {
    pub job: &'a str,
    pub contents: Contents,
    pub layout: &'a Layout,
    /// The longest wait for a version that the server can export.
    pub deadline: Duration,
}

/// The part of a server in an export.
pub struct Part {
    pub server: ServerId,
    pub address: String,
    pub admin: AdminClient<Channel>,
    /// The shards that the server owns at the exported version.
    pub owned: Vec<ShardId>,
}

/// Takes little-endian elements of an array, from the given element of the flat space on.
pub type Sink<'a> = dyn Fn(StateArray, u64, &[u8]) -> Result<(), Fault> + Sync + 'a;

/// Elements received of each array of a shard. Each array arrives from its start on.
type Received = [u64; 3];

impl Export<'_> {
    /// Passes the server's part to `sink`. Returns the number of updates that made the version.
    pub(crate) async fn receive(&self, version: Version, part: &Part, sink: &Sink<'_>) -> Result<u64, Fault> {
        let Part { address, owned, .. } = part;
        let patience = self.deadline + GRACE;
        let silent = || {
            let limit = format!("a message within {} s", patience.as_secs());
            let value = format!("{address}, silent");
            Fault::new(FaultKind::Deadline, "export", value, limit, "look at that server's log")
        };
        let refused = |status: tonic::Status| fault_from_status(&status, address);
        let request = v1::ExportRequest {
            job: self.job.to_string(),
            version: version.0,
            dtype: dtype_to_wire(self.contents.dtype()),
            deadline_ms: self.deadline.as_millis() as u64,
            state: matches!(self.contents, Contents::State(_)),
        };
        let answer =
            host::timeout(patience, part.admin.clone().export(request)).await.map_err(|_| silent())?;
        let mut stream = answer.map_err(refused)?.into_inner();
        let mut received = vec![Received::default(); owned.len()];
        loop {
            let message = host::timeout(patience, stream.message()).await;
            let Some(message) = message.map_err(|_| silent())?.map_err(refused)? else {
                let remedy = "export to a faster disk, or look at that server's log";
                let value = format!("{address}, which ended early");
                return Err(Fault::new(FaultKind::Unavailable, "export", value, "whole", remedy));
            };
            if message.end {
                self.check_end(version, part, &message, &received)?;
                return Ok(message.applied);
            }
            self.take(part, &message, &mut received, sink)?;
        }
    }

    /// The arrays that arrive for a shard. A frozen shard has weights alone.
    fn arrays(&self, shard: ShardId) -> &'static [StateArray] {
        let arrays = self.contents.arrays();
        if self.layout.is_frozen(shard) { &arrays[..1] } else { arrays }
    }

    fn take(
        &self,
        Part { address, owned, .. }: &Part,
        message: &v1::ExportResponse,
        received: &mut [Received],
        sink: &Sink<'_>,
    ) -> Result<(), Fault> {
        let shard = ShardId(message.shard);
        let Ok(index) = owned.binary_search(&shard) else {
            return Err(moved(format!("{shard} from {address}"), "a shard of this server"));
        };
        let array = array_from_wire("export.array", message.array)?;
        if !self.arrays(shard).contains(&array) {
            return Err(broken(address, array.to_string(), "an array that was asked for"));
        }
        let received = &mut received[index][array.index()];
        let size = self.contents.dtype().bytes();
        let elements = message.payload.len() as u64 / size;
        let room = self.layout.shard_len(shard) - *received;
        let fits = !message.payload.is_empty()
            && message.payload.len() <= CHUNK_BYTES
            && (message.payload.len() as u64).is_multiple_of(size)
            && message.offset == *received
            && elements <= room;
        if !fits {
            let value = format!("{} bytes at {} of {shard}", message.payload.len(), message.offset);
            let limit = format!("at most {room} elements at {received}");
            return Err(broken(address, value, limit));
        }
        let found = crc32(&message.payload);
        if found != message.crc32 {
            let value = format!("checksum {found:08x} of {shard} at {}", message.offset);
            return Err(broken(address, value, format!("{:08x}, as was sent", message.crc32)));
        }
        *received += elements;
        sink(array, self.layout.shard_range(shard).start + message.offset, &message.payload)
    }

    fn check_end(
        &self,
        asked: Version,
        Part { address, owned, .. }: &Part,
        message: &v1::ExportResponse,
        received: &[Received],
    ) -> Result<(), Fault> {
        if message.version != asked.0 {
            // A request for version 0 gets the server's current version.
            let remedy = "export again: training has begun meanwhile";
            return Err(Fault::new(FaultKind::Precondition, "version", message.version, asked, remedy));
        }
        for (&shard, received) in owned.iter().zip(received) {
            let whole = self.layout.shard_len(shard);
            if *received == Received::default() {
                return Err(moved(format!("nothing of {shard} from {address}"), "the shards of this server"));
            }
            let lacking = self.arrays(shard).iter().find(|array| received[array.index()] != whole);
            if let Some(array) = lacking {
                let value = format!("{} elements of {shard} ({array})", received[array.index()]);
                return Err(broken(address, value, whole));
            }
        }
        Ok(())
    }
}

/// Field of a fault: a decision has moved shards since the placement was read.
pub(crate) const MOVED: &str = "export.shards";

pub(crate) fn moved(value: String, limit: &str) -> Fault {
    let remedy = "export again, once `longshore status` shows no shards that move";
    Fault::new(FaultKind::Precondition, MOVED, value, limit, remedy)
}

fn broken(address: &str, value: String, limit: impl std::fmt::Display) -> Fault {
    let remedy = "run the server's version of longshore";
    Fault::new(FaultKind::Corrupt, "export", format!("{value} from {address}"), limit, remedy)
}
