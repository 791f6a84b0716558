//! Makes the view of a job from its servers' answers and from earlier looks.

use std::collections::VecDeque;

use longshore_proto::{DECISION_AWAITED, STATE_AWAITED};
use longshore_wire::v1::{self, DescribeResponse};

use super::{
    troubles::{troubles, without},
    view::{JobView, MovesView, Part, RankView, State, StepView},
};
use crate::{
    servers::{Answers, standing},
    speeds::Speeds,
};

/// Number of steps kept of a job, as many as on the servers.
const KEPT: usize = 512;
/// Number of steps over which the mean time of a step is taken.
const MEAN_OF: usize = 64;

/// Returns the view of a job. `now_ms` is by the servers' clock.
pub(crate) fn job_view(
    job: &str,
    answers: &Answers<DescribeResponse>,
    known: &mut Known,
    now_ms: u64,
) -> JobView {
    let there: Vec<(&String, &DescribeResponse)> =
        answers.iter().filter_map(|(address, answer)| Some((address, answer.as_ref().ok()?))).collect();
    let version = |answer: &DescribeResponse| answer.progress.as_ref().map_or(0, |progress| progress.version);
    let Some((_, first)) = there.first() else {
        let troubles =
            answers.iter().filter_map(|(address, answer)| Some(without(address, answer.as_ref().err()?)));
        return JobView {
            job: job.into(),
            state: State::Away,
            troubles: troubles.collect(),
            ..JobView::default()
        };
    };
    let newest = there.iter().map(|(_, answer)| version(answer)).max().unwrap_or(0);
    // The answer with the most steps: a restarted server knows few.
    let told =
        there.iter().max_by_key(|(_, answer)| answer.steps.len()).map(|(_, answer)| answer.steps.as_slice());
    known.note(told.unwrap_or_default(), newest);
    let applied = |answer: &DescribeResponse| answer.progress.as_ref().map_or(0, |progress| progress.applied);
    let speeds: Vec<Speeds> =
        there.iter().map(|(_, answer)| Speeds::of(&answer.steps, answer.update_bytes)).collect();
    let sum = |of: fn(&Speeds) -> Option<f64>| speeds.iter().filter_map(of).reduce(|sum, of| sum + of);
    let updating = speeds.iter().filter(|speeds| speeds.updated.is_some()).count();
    let times: Vec<f64> = known.steps.iter().rev().filter_map(|step| step.seconds).take(MEAN_OF).collect();
    let mean = times.iter().sum::<f64>() / times.len() as f64;
    // Causes are shown before their effects: first a shard's missing state, then a missing gradient, then a missing
    // decision.
    let waits = there.iter().map(|(_, answer)| &answer.waiting_for).filter(|waits| !waits.is_empty());
    let waiting =
        waits.min_by_key(|waits| (!waits.starts_with(STATE_AWAITED), waits.starts_with(DECISION_AWAITED)));
    let mut view = JobView {
        job: job.into(),
        state: state(&there),
        troubles: Vec::new(),
        waiting_for: waiting.cloned().unwrap_or_default(),
        moves: moves(&there),
        version: newest,
        applied: applied(first),
        parameters: first.parameters,
        tensors: first.tensors,
        steps_per_s: (mean > 0.0).then(|| 1.0 / mean),
        pushed_per_s: sum(|speeds| speeds.pushed),
        pulled_per_s: sum(|speeds| speeds.pulled),
        update_per_s: sum(|speeds| speeds.updated).map(|sum| sum / updating as f64),
        parts: there.iter().map(|(address, answer)| part(address, answer, version(answer))).collect(),
        ranks: first.ranks.iter().map(rank_view).collect(),
        steps: known.steps.iter().copied().collect(),
    };
    view.troubles = troubles(&view, answers, now_ms);
    view
}

/// Returns the change of servers that is under way; None once it is over.
fn moves(there: &[(&String, &DescribeResponse)]) -> Option<MovesView> {
    let scaling = || there.iter().filter_map(|(_, answer)| answer.scaling.as_ref());
    let newest = scaling().max_by_key(|scaling| scaling.asked_micros)?;
    let awaited_shards = scaling().map(|scaling| scaling.awaited_shards).sum();
    if awaited_shards == 0 && scaling().any(|scaling| scaling.reached_micros >= newest.asked_micros) {
        return None;
    }
    let failures = scaling().map(|scaling| &scaling.failure);
    Some(MovesView {
        wanted: newest.wanted.clone(),
        awaited_shards,
        fetched_bytes: scaling().map(|scaling| scaling.fetched_bytes).sum(),
        obstacle: failures.into_iter().find(|failure| !failure.is_empty()).cloned().unwrap_or_default(),
    })
}

fn part(address: &str, answer: &DescribeResponse, version: u64) -> Part {
    Part {
        server: address.into(),
        version,
        elements: answer.elements,
        memory_bytes: answer.memory_bytes,
        drive_bytes: answer.disk_bytes,
        written_bytes: answer.disk_written_bytes,
        threads: answer.threads,
        isa: answer.isa.clone(),
    }
}

fn rank_view(rank: &v1::RankStatus) -> RankView {
    RankView {
        rank: rank.rank,
        state: standing(rank),
        transport: rank.transport.clone(),
        last_step: rank.last_step,
    }
}

fn state(there: &[(&String, &DescribeResponse)]) -> State {
    let phase = |wanted: v1::Phase| {
        there.iter().any(|(_, one)| one.progress.as_ref().is_some_and(|progress| progress.phase() == wanted))
    };
    if there.iter().any(|(_, answer)| !answer.failure.is_empty()) {
        State::Failed
    } else if phase(v1::Phase::Paused) {
        State::Paused
    } else if phase(v1::Phase::Loading) {
        State::Loading
    } else if there.iter().any(|(_, answer)| answer.ranks.iter().any(|rank| standing(rank) == "joined")) {
        State::Training
    } else {
        State::Idle
    }
}

#[derive(Default)]
pub(crate) struct Known {
    steps: VecDeque<StepView>,
}

impl Known {
    pub(crate) fn last_step(&self) -> u64 {
        self.steps.back().map_or(0, |step| step.step)
    }

    /// Adds new steps. A step that was taken back and decided again replaces its earlier record.
    fn note(&mut self, steps: &[v1::DecidedStep], version: u64) {
        let first = steps.first().map_or(u64::MAX, |step| step.step);
        self.steps.retain(|step| step.step < first && step.step <= version);
        self.steps.extend(steps.iter().map(step_view));
        while self.steps.len() > KEPT {
            self.steps.pop_front();
        }
    }
}

fn step_view(step: &v1::DecidedStep) -> StepView {
    StepView {
        step: step.step,
        unix_ms: step.unix_ms,
        seconds: step.seconds,
        skipped: step.skipped,
        norm: step.norm,
        learning_rate: step.learning_rate,
        loss: step.loss,
        exposed_seconds: step.exposed_seconds,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use longshore_proto::Fault;

    use super::*;

    pub(in crate::top) const NOW_MS: u64 = 1_800_000_000_000;

    /// An answer of a server in the middle of a job. The last of `steps` steps was decided `ago_ms` ago.
    pub(in crate::top) fn answer(steps: u64, ago_ms: u64) -> DescribeResponse {
        let decided = |step: u64| v1::DecidedStep {
            step,
            unix_ms: NOW_MS - ago_ms - (steps - step) * 500,
            seconds: (step > 1).then_some(0.5),
            norm: 1.0 + step as f64,
            loss: Some(5.0 - step as f64 / 100.0),
            exposed_seconds: Some(0.01),
            learning_rate: 0.001,
            pushed_bytes: step * 1_000_000,
            pulled_bytes: step * 1_000_000,
            update_seconds: step as f64 * 0.001,
            ..Default::default()
        };
        DescribeResponse {
            progress: Some(v1::JobProgress {
                phase: v1::Phase::Training.into(),
                version: steps,
                applied: steps,
                ..Default::default()
            }),
            ranks: vec![v1::RankStatus {
                incarnation: 7,
                last_step: steps,
                transport: "tcp".into(),
                ..Default::default()
            }],
            memory_bytes: 30 << 20,
            parameters: 880_000,
            tensors: 60,
            threads: 2,
            isa: "avx2".into(),
            elements: 880_000,
            update_bytes: 880_000 * 30,
            steps: (1..=steps).map(decided).collect(),
            ..Default::default()
        }
    }

    pub(in crate::top) fn view_of(answer: Result<DescribeResponse, Fault>) -> JobView {
        let answers = vec![("host1:7070".to_string(), answer)];
        job_view("default", &answers, &mut Known::default(), NOW_MS)
    }

    #[test]
    fn a_job_that_trains_has_rates_and_no_trouble() {
        let mut known = Known::default();
        let mut look = |servers: usize, steps: u64| {
            let answers = (0..servers).map(|server| (server.to_string(), Ok(answer(steps, 100)))).collect();
            job_view("default", &answers, &mut known, NOW_MS)
        };
        look(1, 100);
        let view = look(2, 110);
        assert_eq!(
            (view.state, view.version, view.troubles.as_slice()),
            (State::Training, 110, [].as_slice())
        );
        assert_eq!((view.steps_per_s, view.pushed_per_s), (Some(2.0), Some(4e6)));
        assert!(view.update_per_s.is_some_and(|rate| (rate / (30.0 * 880_000.0 / 0.001) - 1.0).abs() < 1e-6));
        assert_eq!(view.steps.len(), 110, "each step is there once");
    }

    #[test]
    fn a_job_of_killed_ranks_waits_and_one_whose_ranks_have_left_does_not() {
        let waits = || DescribeResponse { waiting_for: "rank 1".into(), ..answer(20, 60_000) };
        let mut killed = waits();
        killed.ranks[0].transport.clear();
        let killed = view_of(Ok(killed));
        assert_eq!((killed.state, killed.ranks[0].state), (State::Idle, "not connected"));
        assert!(killed.troubles[0].what.contains("it waits for rank 1"), "{killed:?}");
        let mut ended = waits();
        ended.ranks[0].left = true;
        let ended = view_of(Ok(ended));
        assert!(ended.state == State::Idle && ended.troubles.is_empty(), "{ended:?}");
    }

    #[test]
    fn the_server_that_lacks_a_gradient_says_why_a_job_waits() {
        let waits = |text: &str| DescribeResponse { waiting_for: text.into(), ..answer(20, 60_000) };
        let decision = format!("{DECISION_AWAITED}step 21 (its commit) from rank 0");
        let answers = [&decision, "step 21, micro-step 0, shard 1 from rank 1", ""]
            .map(|text| ("host:7070".to_string(), Ok(waits(text))));
        let view = job_view("default", &answers.into(), &mut Known::default(), NOW_MS);
        assert!(view.waiting_for.ends_with("from rank 1"), "{view:?}");
        // A decision awaited for 1 s is no trouble; one awaited for 60 s is.
        let waits = |ago_ms| DescribeResponse { waiting_for: decision.clone(), ..answer(20, ago_ms) };
        assert!(view_of(Ok(waits(1000))).troubles.is_empty());
        let stalled = view_of(Ok(waits(60_000)));
        assert!(
            stalled.troubles[0].what.contains("60 s: it waits for the decision on step 21"),
            "{stalled:?}"
        );
    }

    #[test]
    fn a_step_that_was_taken_back_is_there_once() {
        let mut known = Known::default();
        known.note(&answer(10, 0).steps, 10);
        let again = v1::DecidedStep { step: 9, norm: 99.0, ..Default::default() };
        known.note(&[again], 9);
        let norms: Vec<f64> = known.steps.iter().map(|step| step.norm).collect();
        assert_eq!((norms.len(), norms[8], norms[7]), (9, 99.0, 9.0));
    }
}
