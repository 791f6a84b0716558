//! The promises of every tier, tested through its objects alone: a list of tiers, and a list of behaviours.
//!
//! A new tier is one line of [`tiers`]. A behaviour that needs an optional object runs wherever that object
//! is given.

mod durable;
mod fixture;
mod state;
mod stored;

use fixture::TierCase;
use longshore_engine::tier::Spill;
use longshore_proto::TierKind;

/// Returns every tier with every setting that changes its objects.
fn tiers() -> Vec<TierCase> {
    vec![
        TierCase::new("memory", TierKind::Memory, 0, |_| {}),
        TierCase::new("shm", TierKind::Shm, 0, |_| {}),
        TierCase::new("nvme", TierKind::Nvme, 2, |storage| storage.buffers = 1),
        TierCase::new("nvme, resident", TierKind::Nvme, 1, |storage| storage.resident_bytes = 1 << 30),
        TierCase::new("nvme, spilled", TierKind::Nvme, 2, |storage| storage.spill = Spill::All),
    ]
}

/// Runs a behaviour on each tier. A failure names its tier.
fn each(behaviour: impl Fn(&TierCase)) {
    for case in tiers() {
        println!("tier {}", case.name);
        behaviour(&case);
    }
}

/// Like [`each`], for the tiers that satisfy `has`. At least one must.
fn each_that(has: impl Fn(&TierCase) -> bool, behaviour: impl Fn(&TierCase)) {
    let cases: Vec<_> = tiers().into_iter().filter(|case| has(case)).collect();
    assert!(!cases.is_empty(), "no tier has it");
    for case in cases {
        println!("tier {}", case.name);
        behaviour(&case);
    }
}
