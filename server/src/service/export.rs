//! Weights out for readers that are no workers: one version of them, rounded as asked, while training goes on.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use longshore_engine::job::Exported;
use longshore_proto::{
    Dtype, Fault, FaultKind, Version,
    checksum::crc32,
    wire::{self, v1},
};
use tokio::{runtime::Handle, sync::mpsc};
use tonic::Status;

use super::{Services, refuse};

/// Messages made ahead of the network: 4 MiB for each export.
const MESSAGES_AHEAD: usize = 4;
/// Longest wait for a reader to take one message. An update may be waiting behind it.
const STALL: Duration = Duration::from_secs(10);

pub(super) type Messages = mpsc::Receiver<Result<v1::ExportResponse, Status>>;
type Sender = mpsc::Sender<Result<v1::ExportResponse, Status>>;

/// Starts an export. What goes wrong after this is the stream's last message.
pub(super) fn start(services: &Services, request: v1::ExportRequest) -> Result<Messages, Fault> {
    let job = Arc::clone(&services.jobs.get(&request.job)?.job);
    let dtype = Dtype::from_wire("export.dtype", request.dtype)?;
    let deadline = Instant::now() + wire::deadline(request.deadline_ms)?;
    let version = (request.version > 0).then_some(Version(request.version));
    let (sender, messages) = mpsc::channel(MESSAGES_AHEAD);
    let runtime = Handle::current();
    // Holds the stream open until the last message is in it.
    let last = sender.clone();
    tokio::task::spawn_blocking(move || {
        let (name, from) = (job.spec().name.clone(), Instant::now());
        let sink = move |exported: Exported<'_>| send(&runtime, &sender, &exported);
        match job.export(version, dtype, deadline, sink) {
            Ok(info) => {
                let took = from.elapsed().as_secs_f64();
                tracing::info!(job = %name, version = %info.version, %dtype, took, "exported");
                let end = v1::ExportResponse { version: info.version.0, end: true, ..Default::default() };
                let _ = last.blocking_send(Ok(end)); // to a reader who left, nothing need be said
            }
            Err(fault) => {
                let _ = last.try_send(Err(refuse("Export", name.as_str(), fault)));
            }
        }
    });
    Ok(messages)
}

/// On a thread of the engine.
fn send(runtime: &Handle, sender: &Sender, exported: &Exported<'_>) -> Result<(), Fault> {
    let message = v1::ExportResponse {
        version: 0,
        end: false,
        shard: exported.shard.0,
        offset: exported.offset,
        crc32: crc32(exported.bytes),
        payload: Bytes::copy_from_slice(exported.bytes),
    };
    runtime.block_on(sender.send_timeout(Ok(message), STALL)).map_err(|error| {
        let (kind, value) = match error {
            mpsc::error::SendTimeoutError::Timeout(_) => (FaultKind::Deadline, "took nothing"),
            mpsc::error::SendTimeoutError::Closed(_) => (FaultKind::Unavailable, "left"),
        };
        let limit = format!("a message within {} s", STALL.as_secs());
        Fault::new(kind, "export.reader", value, limit, "export to a faster disk, or try again")
    })
}
