//! Contributions in, acknowledgements out.
//!
//! A stream is not read further while its chunk's buffer is busy, so a fast rank is held back by HTTP/2 flow control
//! and this server holds at most one chunk a stream beside its slots.

use std::sync::Arc;

use futures_util::{Stream, StreamExt, stream::BoxStream};
use longshore_engine::job::Stored;
use longshore_proto::{
    ContributionChunk, Fault,
    wire::{self, v1},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{Services, default_deadline};
use crate::jobs::JobHandle;

/// Acknowledgements in one message. Many small messages would be taken for abuse by HTTP/2 peers, and each costs a
/// write; at 64 an acknowledgement costs 1/64 of that.
const RESULTS_BATCHED: usize = 64;

pub(super) fn stream(
    services: Services,
    requests: Streaming<v1::PushRequest>,
) -> BoxStream<'static, Result<v1::PushResponse, Status>> {
    let (sender, receiver) = mpsc::channel(RESULTS_BATCHED);
    tokio::spawn(receive(services, requests, sender));
    batched(ReceiverStream::new(receiver)).boxed()
}

/// Joins what is ready into one message; an error ends the stream after what came before it.
fn batched(
    results: impl Stream<Item = Result<v1::PushResult, Status>>,
) -> impl Stream<Item = Result<v1::PushResponse, Status>> {
    results.ready_chunks(RESULTS_BATCHED).flat_map(|chunk| {
        let mut messages = Vec::with_capacity(2);
        let mut results = Vec::with_capacity(chunk.len());
        let mut error = None;
        for result in chunk {
            match result {
                Ok(result) => results.push(result),
                Err(status) => error = Some(Err(status)),
            }
        }
        if !results.is_empty() {
            messages.push(Ok(v1::PushResponse { results }));
        }
        messages.extend(error);
        futures_util::stream::iter(messages)
    })
}

async fn receive(
    services: Services,
    mut requests: Streaming<v1::PushRequest>,
    results: mpsc::Sender<Result<v1::PushResult, Status>>,
) {
    let mut held: Option<Arc<JobHandle>> = None;
    loop {
        let request = match requests.message().await {
            Ok(Some(request)) => request,
            Ok(None) => return,
            Err(status) => {
                // The peer went away or sent what is no message; nothing of it was stored.
                tracing::debug!(%status, "push stream ended");
                let _ = results.send(Err(status)).await;
                return;
            }
        };
        let outcome = store(&services, &mut held, &request).await;
        let (duplicate, refusal) = match outcome {
            Ok(duplicate) => (duplicate, None),
            Err(fault) => {
                tracing::debug!(
                    job = request.job,
                    rank = request.rank,
                    step = request.step,
                    shard = request.shard,
                    %fault,
                    "chunk refused"
                );
                (false, Some(wire::fault_to_wire(&fault)))
            }
        };
        let result = v1::PushResult {
            step: request.step,
            micro_step: request.micro_step,
            shard: request.shard,
            chunk: request.chunk,
            duplicate,
            refusal,
        };
        if results.send(Ok(result)).await.is_err() {
            return;
        }
    }
}

/// True when the chunk was held already.
async fn store(
    services: &Services,
    held: &mut Option<Arc<JobHandle>>,
    request: &v1::PushRequest,
) -> Result<bool, Fault> {
    let chunk = wire::chunk_from_wire(request)?;
    let handle = match held {
        Some(handle) if handle.job.spec().name.as_str() == request.job && !handle.is_closed() => {
            Arc::clone(handle)
        }
        _ => services.jobs.get(&request.job)?,
    };
    *held = Some(Arc::clone(&handle));
    handle.check_step(chunk.contribution.step)?;
    store_when_free(&handle, &chunk, &request.payload).await
}

async fn store_when_free(
    handle: &Arc<JobHandle>,
    chunk: &ContributionChunk,
    payload: &[u8],
) -> Result<bool, Fault> {
    let check = || {
        Ok(match handle.job.store(chunk, payload)? {
            Stored::Busy => None,
            Stored::Duplicate => Some(true),
            Stored::New(work) => {
                handle.perform(work);
                Some(false)
            }
        })
    };
    handle.until(default_deadline(), check, || handle.late("push", chunk.contribution)).await
}
