//! The `nvme` tier against its device: `cargo bench -p longshore-engine --bench storage -- <dir> <million parameters>`.

use std::path::PathBuf;

use longshore_engine::{
    io::Engine,
    threads::{Pool, available_threads},
    tier::{Durability, Storage, nvme::bench},
};
use longshore_proto::{Dtype, JobName, JobSpec, Param, Rule, TierKind};

fn spec(parameters: u64) -> JobSpec {
    JobSpec {
        name: JobName::parse("name", "bench").unwrap(),
        params: vec![Param { name: "all".into(), shape: vec![parameters], group: 0 }],
        groups: vec!["all".into()],
        rule: Rule::AdamW,
        gradient_dtype: Dtype::Bf16,
        image_dtype: Dtype::Bf16,
        world_size: 1,
        micro_steps: 1,
        max_delay: 0,
        shard_elements: longshore_proto::limits::DEFAULT_SHARD_ELEMENTS,
        tier: TierKind::Nvme,
    }
}

fn main() {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let root = tempfile::tempdir_in(arguments.first().map_or(".", String::as_str)).unwrap();
    let millions: u64 = arguments.get(1).map_or(100, |millions| millions.parse().unwrap());
    let spec = spec(millions * 1_000_000);
    let dirs: Vec<PathBuf> = vec![root.path().to_path_buf()];
    let state = millions * 12_000_000;
    let pool = Pool::new(available_threads()).unwrap();
    for (engine, durability, resident) in [
        (Engine::Auto, Durability::EachVersion, 0),
        (Engine::Threads, Durability::EachVersion, 0),
        (Engine::Auto, Durability::EachVersion, 5),
        (Engine::Auto, Durability::EachVersion, 10),
        (Engine::Auto, Durability::Nothing, 0),
        (Engine::Auto, Durability::Nothing, 5),
    ] {
        let resident_bytes = state * resident / 10;
        let storage =
            Storage { dirs: dirs.clone(), engine, durability, resident_bytes, ..Storage::default() };
        let mut rounds = bench(&spec, &storage, &pool, 5).unwrap();
        rounds.sort_by(|a, b| a.fraction().total_cmp(&b.fraction()));
        let median = rounds[rounds.len() / 2];
        println!(
            "{engine:?}, {durability:?}, resident {resident}/10: bare {:.2} GB/s, store {:.2} GB/s, fraction {:.2} \
             [{:.2}..{:.2}], step {:.3} s, {:.2} GB moved",
            median.raw_gb_per_second(),
            median.step_gb_per_second(),
            median.fraction(),
            rounds[0].fraction(),
            rounds[rounds.len() - 1].fraction(),
            median.step_seconds,
            median.bytes as f64 / 1e9,
        );
    }
}
