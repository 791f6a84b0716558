//! Watch: a stream of commits, pauses and resumes.

use std::{sync::Arc, time::Duration};

use longshore_engine::step::{Phase, Wanted};
use longshore_proto::{Fault, FaultKind, Incarnation, Rank, Step, TierKind, limits::MAX_DEADLINE_MS};
use longshore_wire::{
    Wire,
    v1::{self, event},
};
use tokio::time::Instant;

use super::{
    Services,
    convert::numbers,
    default_deadline, refuse,
    room::{Answers, Room, answers},
};
use crate::jobs::JobHandle;

/// Events already sent to a watcher.
struct Told {
    step: Step,
    pauses: u64,
    resumes: u64,
    /// Number of the operator's latest request (`Wanted::words`) that the watcher has been sent.
    wanted: u64,
}

/// Starts a stream of events. `is_rank` means that the caller may be the rank that it names. The open stream then shows
/// that the rank's process lives.
pub(super) fn stream(
    services: &Services,
    request: &v1::WatchRequest,
    is_rank: bool,
    room: Room,
) -> Result<Answers<v1::Event>, Fault> {
    let handle = services.jobs.get(&request.job)?;
    let (pauses, resumes, _) = handle.job.protocol.pauses();
    // A current pause is sent first.
    let (step, pauses) = (Step(request.after_step), pauses.min(resumes));
    let mut told = Told { step, pauses, resumes, wanted: 0 };
    let (sender, answers) = answers();
    let rank = Rank(request.rank);
    let watching = (is_rank && request.incarnation != 0)
        .then(|| handle.processes.enter(rank, Incarnation(request.incarnation)));
    tokio::spawn(async move {
        let _watching = watching;
        loop {
            let news = tokio::select! {
                news = next_news(&handle, &told) => news,
                // A watcher that hung up ends the task, which a job without news would otherwise keep for ever.
                () = sender.closed() => return,
            };
            let (news, mut failed) = news.map_or_else(|fault| (Vec::new(), Some(fault)), |news| (news, None));
            for news in news {
                // A commit may hold a MiB of the trainer's state, so each commit is copied only when it is sent.
                let event = room.make(default_deadline(), || news.event(&handle));
                let event = tokio::select! {
                    event = event => event,
                    () = sender.closed() => return,
                };
                let event = match event {
                    Ok(event) => event,
                    Err(fault) => {
                        failed = Some(fault);
                        break;
                    }
                };
                if sender.send(Ok(event)).await.is_err() {
                    return;
                }
                told.note(&news);
            }
            if let Some(fault) = failed {
                let status = refuse("Watch", handle.job.spec().name.as_str(), fault);
                let _ = sender.send(Err(status)).await;
                return;
            }
        }
    });
    Ok(answers)
}

impl Told {
    fn note(&mut self, news: &News) {
        match news {
            News::Commit(step) => self.step = *step,
            News::Paused(_) => self.pauses += 1,
            News::Resumed(_) => self.resumes += 1,
            News::Wanted(wanted) => self.wanted = wanted.words,
        }
    }
}

/// An event that a watcher has not been sent.
enum News {
    Commit(Step),
    Paused(String),
    Resumed(f64),
    Wanted(Wanted),
}

impl News {
    fn event(&self, handle: &JobHandle) -> Result<v1::Event, Fault> {
        let event = match self {
            News::Commit(step) => {
                let before = Step(step.0 - 1);
                let commits = handle.job.protocol.commits_after(before).ok_or_else(|| forgotten(before))?;
                event::Event::Commit(commits.first().ok_or_else(|| forgotten(before))?.to_wire())
            }
            News::Paused(reason) => event::Event::Paused(v1::Paused { reason: reason.clone() }),
            News::Resumed(loss_scale) => event::Event::Resumed(v1::Resumed { loss_scale: *loss_scale }),
            News::Wanted(wanted) => {
                let Wanted { servers, asked_micros, max_exposed, tier, lost, .. } = wanted.clone();
                let tier = tier.map_or(0, TierKind::number);
                let lost = numbers(&lost);
                event::Event::Wanted(v1::Wanted { servers, asked_micros, lost, max_exposed, tier })
            }
        };
        Ok(v1::Event { event: Some(event) })
    }
}

/// Waits for news. A watcher has no deadline of its own, so the wait has the longest deadline of any call.
async fn next_news(handle: &Arc<JobHandle>, told: &Told) -> Result<Vec<News>, Fault> {
    let deadline = Instant::now() + Duration::from_millis(MAX_DEADLINE_MS);
    let check = || news(handle, told).map(|news| (!news.is_empty()).then_some(news));
    handle.until(deadline, check, || handle.late("watch", "silent")).await
}

fn forgotten(step: Step) -> Fault {
    let limit = "a step whose successors are still kept";
    let remedy = "join again to learn where the job stands";
    Fault::new(FaultKind::NotFound, "after_step", step.0, limit, remedy)
}

/// Returns the news. A pause precedes the commit it comes with, so no rank starts the next step on that commit's
/// loss scale.
fn news(handle: &JobHandle, told: &Told) -> Result<Vec<News>, Fault> {
    let commits = handle.job.protocol.commits_after(told.step).ok_or_else(|| forgotten(told.step))?;
    let (pauses, resumes, loss_scale) = handle.job.protocol.pauses();
    let paused = |_| match handle.job.progress().phase {
        Phase::Paused { reason } => News::Paused(reason),
        _ => News::Paused(String::new()),
    };
    let began =
        (told.pauses..pauses).map(paused).chain(commits.iter().map(|commit| News::Commit(commit.step)));
    let ended = (told.resumes..resumes).map(|_| News::Resumed(loss_scale));
    // A late watcher has missed the end of one pause and the begin of another. The state that lasts comes last.
    let mut news: Vec<News> =
        if pauses > resumes { ended.chain(began).collect() } else { began.chain(ended).collect() };
    news.extend(Some(handle.wanted()).filter(|wanted| wanted.words > told.wanted).map(News::Wanted));
    Ok(news)
}
