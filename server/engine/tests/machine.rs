//! Sends random events to the state machine and to a naive model of it. Both must agree on every answer, and a refused
//! event must change nothing. From every state, workers that keep to the protocol must be able to finish the step.

mod model;
mod pair;

use std::collections::BTreeMap;

use longshore_engine::step::Phase;
use pair::Pair;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_machine_is_the_model(seed in any::<u64>(), events in 0usize..400) {
        let mut pair = Pair::new(seed);
        for _ in 0..events {
            pair.event();
        }
        for _ in 0..3 {
            pair.finish_honestly();
        }
        if matches!(pair.machine.phase(), Phase::Paused { .. }) {
            pair.machine.resume(None, 0.0).unwrap();
        }
        prop_assert_eq!(pair.machine.phase(), &Phase::Training);
    }
}

/// Random events prove something only if they reach every answer.
#[test]
fn the_events_reach_every_answer() {
    let mut answers = BTreeMap::new();
    for seed in 0..500 {
        let mut pair = Pair::new(seed);
        (0..300).for_each(|_| pair.event());
        for (answer, count) in pair.answers {
            *answers.entry(answer).or_insert(0) += count;
        }
    }
    let refusals = [
        "Loading",
        "Paused",
        "NotLoading",
        "UnknownRank",
        "WorldSize",
        "NotJoined",
        "Fenced",
        "Left",
        "NotOwned",
        "WrongDtype",
        "WrongLength",
        "UnknownChunk",
        "UnknownMicroStep",
        "BadLossScale",
        "UnusableLossScale",
        "WrongLossScale",
        "OtherLossScale",
        "MicroStepTooEarly",
        "StepTooEarly",
        "StepZero",
        "OtherChecksum",
        "CommitTooEarly",
        "CommitTooOld",
        "CommitIncomplete",
        "WrongGradientScale",
        "NotFinite",
        "OtherCommit",
        "NotRankZero",
        "NotPaused",
        "PauseTooNew",
        "LossScaleInUse",
        "OtherResume",
    ];
    let accepted =
        ["Write", "Duplicate", "Superseded", "Stale", "Busy", "Decided", "Done"].map(str::to_string);
    for answer in refusals.iter().map(|name| format!("Refused({name:?})")).chain(accepted) {
        assert!(answers.get(&answer).is_some_and(|&count| count >= 5), "{answer} is too rare: {answers:#?}");
    }
}
