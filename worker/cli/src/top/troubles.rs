//! Troubles of a job, with remedies.

use longshore_proto::{Fault, FaultKind, remedies};
use longshore_wire::v1;

use super::view::{JobView, RankView, State, Trouble};
use crate::servers::{Answers, is_not_there};

/// A job without a decision for this many seconds, and for this many of its usual steps, is stalled.
const STALL_S: f64 = 5.0;
const STALL_STEPS: f64 = 5.0;

/// Returns all troubles of the job in its servers' answers. `now_ms` is by the servers' clock.
pub(super) fn troubles(view: &JobView, answers: &Answers<v1::DescribeResponse>, now_ms: u64) -> Vec<Trouble> {
    let mut found = Vec::new();
    let mut say = |what: String, remedy: &str| found.push(Trouble { what, remedy: remedy.into() });
    for (address, answer) in answers {
        let answer = match answer {
            Ok(answer) => answer,
            Err(fault) => {
                let Trouble { what, remedy } = without(address, fault);
                say(what, &remedy);
                continue;
            }
        };
        if !answer.failure.is_empty() {
            say(format!("{address} cannot go on: {}", answer.failure), remedies::FAILED);
        }
        let Some(progress) = &answer.progress else { continue };
        if progress.phase() == v1::Phase::Loading {
            let shards = progress.missing_shards.len();
            say(format!("{address}: {shards} shards wait for their weights"), remedies::LOADING);
        }
        if let Some(checkpoint) =
            answer.checkpoints.as_ref().filter(|checkpoint| !checkpoint.failure.is_empty())
        {
            let what = format!("the last checkpoint failed on {address}: {}", checkpoint.failure);
            say(what, remedies::CHECKPOINT_FAILED);
        }
    }
    if let Some(moves) = view.moves.as_ref().filter(|moves| !moves.obstacle.is_empty()) {
        say(format!("shards cannot move yet: {}", moves.obstacle), "");
    }
    // All servers pause for one reason, so the first reason found is shown.
    let reason = |answer: &v1::DescribeResponse| Some(answer.progress.as_ref()?.pause_reason.clone());
    let mut reasons = answers.iter().filter_map(|(_, answer)| reason(answer.as_ref().ok()?));
    if let Some(reason) = reasons.find(|reason| !reason.is_empty()) {
        say(format!("paused: {reason}"), remedies::of_pause(&reason));
    }
    if let Some((silent, waits)) = stalled(view, now_ms) {
        say(format!("nothing was decided for {silent:.0} s: it waits for {waits}"), remedies::STALLED);
    }
    found
}

/// Returns the seconds since the last decision, and the awaited event. None if the time is usual, or if all ranks have
/// left.
fn stalled(view: &JobView, now_ms: u64) -> Option<(f64, &str)> {
    let is_awaited = |rank: &RankView| ["joined", "not connected"].contains(&rank.state);
    let takes_steps = matches!(view.state, State::Training | State::Idle);
    if !takes_steps || !view.ranks.iter().any(is_awaited) || view.waiting_for.is_empty() {
        return None;
    }
    let last = view.steps.last()?;
    let silent = now_ms.saturating_sub(last.unix_ms) as f64 / 1e3;
    let mut times: Vec<f64> = view.steps.iter().filter_map(|step| step.seconds).collect();
    times.sort_by(f64::total_cmp);
    let usual = times.get(times.len() / 2).copied().unwrap_or(0.0);
    (silent > STALL_S.max(STALL_STEPS * usual)).then_some((silent, view.waiting_for.as_str()))
}

/// Returns the trouble of a server without an answer.
pub(super) fn without(address: &str, fault: &Fault) -> Trouble {
    let what = match (fault.kind, fault.field.as_str()) {
        _ if is_not_there(fault) => {
            format!("{address} does not hold this job: it restarted, or belongs to another")
        }
        (FaultKind::Unavailable, "job") => format!("{address} is recovering this job"),
        _ => format!("{address}: {} is {}, but must be {}", fault.field, fault.value, fault.limit),
    };
    Trouble { what, remedy: fault.remedy.clone() }
}
