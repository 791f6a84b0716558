//! Watch: a stream of commits, pauses and resumes.

use std::{sync::Arc, time::Duration};

use longshore_proto::{Fault, FaultKind, Incarnation, Rank, Step, limits::MAX_DEADLINE_MS};
use longshore_wire::{
    Wire,
    v1::{self, event},
};
use tokio::{sync::mpsc, time::Instant};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{Services, refuse};
use crate::jobs::JobHandle;

/// Events already sent to a watcher.
struct Told {
    step: Step,
    pauses: u64,
    resumes: u64,
}

/// Starts a stream of events. `is_rank`: the caller may be the rank that it names, whose presence the stream then is.
pub(super) fn stream(
    services: &Services,
    request: &v1::WatchRequest,
    is_rank: bool,
) -> Result<ReceiverStream<Result<v1::Event, Status>>, Fault> {
    let handle = services.jobs.get(&request.job)?;
    let (pauses, resumes, _) = handle.job.pauses();
    // A current pause is sent first.
    let mut told = Told { step: Step(request.after_step), pauses: pauses.min(resumes), resumes };
    let (sender, receiver) = mpsc::channel(4);
    let rank = Rank(request.rank);
    let watching = (is_rank && request.incarnation != 0)
        .then(|| handle.watchers.enter(rank, Incarnation(request.incarnation)));
    tokio::spawn(async move {
        let _watching = watching;
        loop {
            let events = tokio::select! {
                events = next_events(&handle, &told) => events,
                // Detects a watcher that hung up: a job that never moves would keep the task forever.
                () = sender.closed() => return,
            };
            let events = match events {
                Ok(events) => events,
                Err(fault) => {
                    let status = refuse("Watch", handle.job.spec().name.as_str(), fault);
                    let _ = sender.send(Err(status)).await;
                    return;
                }
            };
            for event in events {
                told.note(&event);
                if sender.send(Ok(v1::Event { event: Some(event) })).await.is_err() {
                    return;
                }
            }
        }
    });
    Ok(ReceiverStream::new(receiver))
}

impl Told {
    fn note(&mut self, event: &event::Event) {
        match event {
            event::Event::Commit(commit) => self.step = Step(commit.step),
            event::Event::Paused(_) => self.pauses += 1,
            event::Event::Resumed(_) => self.resumes += 1,
        }
    }
}

/// Waits for new events. A watcher has no deadline of its own, so the wait takes the longest.
async fn next_events(handle: &Arc<JobHandle>, told: &Told) -> Result<Vec<event::Event>, Fault> {
    let deadline = Instant::now() + Duration::from_millis(MAX_DEADLINE_MS);
    let check = || news(handle, told).map(|events| (!events.is_empty()).then_some(events));
    handle.until(deadline, check, || handle.late("watch", "silent")).await
}

/// Returns new events. A pause precedes the commit it comes with, so no rank starts the next step on that commit's
/// loss scale.
fn news(handle: &JobHandle, told: &Told) -> Result<Vec<event::Event>, Fault> {
    let commits = handle.job.commits_after(told.step).ok_or_else(|| {
        let limit = "a step whose successors are still kept";
        Fault::new(
            FaultKind::NotFound,
            "after_step",
            told.step.0,
            limit,
            "join again to learn where the job stands",
        )
    })?;
    let (pauses, resumes, loss_scale) = handle.job.pauses();
    let mut events = Vec::new();
    for _ in told.pauses..pauses {
        let reason = match handle.job.progress().phase {
            longshore_engine::step::Phase::Paused { reason } => reason,
            _ => String::new(),
        };
        events.push(event::Event::Paused(v1::Paused { reason }));
    }
    events.extend(commits.iter().map(|commit| event::Event::Commit(commit.to_wire())));
    for _ in told.resumes..resumes {
        events.push(event::Event::Resumed(v1::Resumed { loss_scale }));
    }
    Ok(events)
}
