//! `longshore bench update`: the fused update of many parameters, as on a server, beside its memory traffic.

mod cases;

use std::time::Instant;

use longshore_engine::{
    kernels::{self, Gradient, Hyper, ImageMut, Random, Scalars},
    threads::{ThreadPool, available_threads},
    tier::StateMut,
};
use longshore_proto::{Dtype, Formats};

pub(super) use self::cases::Update;
use self::cases::{Case, Images};
use super::{
    Measured,
    arrays::{Arrays, BLOCK, Shard, fitting},
    limit, median, receive,
};

pub(crate) struct Settings {
    /// Number of parameters; None means 200 million, or as many as half of the available memory holds.
    pub(crate) params: Option<u64>,
    pub(crate) rounds: usize,
    /// Only cases whose name contains this text.
    pub(crate) filter: String,
    /// Every rule with every format and instruction set.
    pub(crate) all: bool,
}

impl Arrays {
    /// Returns the seconds of one pass of a case or of its limit.
    fn time(&mut self, pool: &ThreadPool, case: Case, is_limit: bool) -> anyhow::Result<f64> {
        if let Case::Update(update) = case {
            self.prepare(pool, update.formats);
        }
        let begun = Instant::now();
        match case {
            Case::Update(update) if is_limit => limit::pass(self, pool, update.shape()),
            Case::Update(update) => self.pass(pool, update),
            Case::Receive { source, wire, isa } => {
                receive::pass(self, pool, source, wire, (!is_limit).then_some(isa))?;
            }
        }
        Ok(begun.elapsed().as_secs_f64())
    }

    /// Runs a step of all parameters.
    fn pass(&mut self, pool: &ThreadPool, case: Update) {
        let hyper = Hyper { lr: 1e-6, momentum: 0.9, weight_decay: 0.0, ..Hyper::default() };
        let scalars = Scalars::new(case.rule, &hyper, 10, 1.0);
        let scalars = match case.images {
            Images::Ahead => scalars.looking_ahead(&hyper, 10, hyper.lr),
            Images::Plain => scalars,
        };
        let mut first_element = 0;
        for shard in &mut self.shards {
            let blocks = shard.blocks(case).into_iter().enumerate().collect();
            pool.blocks(blocks, |(block, (gradient, mut state, mut image))| {
                if case.formats.is_fp32() {
                    return kernels::update(case.isa, &scalars, gradient, state.f32(), image);
                }
                let first_element = first_element + (block * BLOCK) as u64;
                let random = Random { seed: case.formats.seed, step: 10, first_element };
                let segments = [(0..BLOCK, &scalars)];
                let image = image.slice(0..BLOCK);
                kernels::update_low(case.isa, &segments, gradient, state.low(), image, random);
            });
            first_element += shard.len as u64;
        }
    }
}

impl Shard {
    fn blocks(&mut self, case: Update) -> Vec<(Gradient<'_>, StateMut<'_>, ImageMut<'_>)> {
        let (gradient, state, image) = self.cut(case.shape());
        let wire = BLOCK * case.wire.bytes() as usize;
        let blocks = gradient.chunks(wire).zip(state.blocks()).zip(image.chunks_mut(wire));
        let block = |((gradient, state), image)| match case.wire {
            Dtype::F32 => (
                Gradient::f32(bytemuck::cast_slice(gradient)),
                state,
                ImageMut::F32(bytemuck::cast_slice_mut(image)),
            ),
            Dtype::F16 => (
                Gradient::f16(bytemuck::cast_slice(gradient)),
                state,
                ImageMut::F16(bytemuck::cast_slice_mut(image)),
            ),
            Dtype::Bf16 => (
                Gradient::bf16(bytemuck::cast_slice(gradient)),
                state,
                ImageMut::Bf16(bytemuck::cast_slice_mut(image)),
            ),
        };
        blocks.map(block).collect()
    }
}

/// Updates by AdamW with bf16 on the fastest instruction set, and nothing else.
pub(super) struct Bare {
    arrays: Arrays,
    pool: ThreadPool,
    update: Update,
    params: usize,
}

impl Bare {
    pub(super) fn new(params: u64, threads: usize, formats: Formats) -> anyhow::Result<Bare> {
        let params = fitting(Some(params), longshore_server::config::available_memory())?;
        let pool = ThreadPool::new(threads)?;
        let mut arrays = Arrays::allocate(params, &pool)?;
        arrays.prepare(&pool, formats);
        Ok(Bare { arrays, pool, update: Update { formats, ..Update::plain() }, params })
    }

    pub(super) fn adopt_caller(&self) {
        self.pool.adopt_caller();
    }

    pub(super) fn pass(&mut self) {
        self.arrays.pass(&self.pool, self.update);
    }

    /// Bytes that a pass moves through memory.
    pub(super) fn bytes(&self) -> f64 {
        self.params as f64 * self.update.shape().block_bytes() as f64 / BLOCK as f64
    }

    /// Returns the bytes a second of this many passes, after a warm-up pass.
    pub(super) fn bytes_per_s(&mut self, passes: usize) -> f64 {
        self.pass();
        let pass = |_| {
            let begun = Instant::now();
            self.pass();
            begun.elapsed().as_secs_f64()
        };
        let seconds: Vec<f64> = (0..passes).map(pass).collect();
        self.bytes() / median(&seconds)
    }
}

/// Returns the names of the cases that [`run`] measures.
pub(crate) fn names(settings: &Settings) -> anyhow::Result<Vec<String>> {
    Ok(selected(settings)?.iter().map(Case::name).collect())
}

/// Measures every case with one thread and with all, in rounds, each beside its limit. `tell` gets each case at
/// once, since all of them take minutes.
pub(crate) fn run(settings: &Settings, mut tell: impl FnMut(&Measured)) -> anyhow::Result<()> {
    let cases = selected(settings)?;
    let params = fitting(settings.params, longshore_server::config::available_memory())?;
    let mut pools = vec![ThreadPool::new(1)?];
    if available_threads() > 1 {
        pools.push(ThreadPool::new(available_threads())?);
    }
    let all = &pools[pools.len() - 1];
    // The calling thread is bound to a core, as a job's compute thread is. Otherwise the scheduler might leave it
    // on the core of the pool's second thread all the time.
    all.adopt_caller();
    let mut arrays = Arrays::allocate(params, all)?;
    let progress = indicatif::ProgressBar::new((settings.rounds * cases.len() * pools.len()) as u64);
    for &case in &cases {
        for pool in &pools {
            let mut measured = Measured {
                bench: "update",
                case: case.name(),
                threads: pool.threads(),
                bytes: (params / BLOCK * case.block_bytes()) as u64,
                params: params as u64,
                times: Vec::new(),
                limits: Vec::new(),
            };
            for round in 0..settings.rounds {
                // Case and limit take turns in going first.
                let limit_first = round % 2 == 0;
                for is_limit in [limit_first, !limit_first] {
                    let seconds = arrays.time(pool, case, is_limit)?;
                    if is_limit { &mut measured.limits } else { &mut measured.times }.push(seconds);
                }
                progress.inc(1);
            }
            progress.suspend(|| tell(&measured));
        }
    }
    progress.finish_and_clear();
    Ok(())
}

fn selected(settings: &Settings) -> anyhow::Result<Vec<Case>> {
    let list = Case::list(settings.all);
    let cases: Vec<Case> =
        list.iter().copied().filter(|case| case.name().contains(&settings.filter)).collect();
    if cases.is_empty() {
        let names: Vec<String> = list.iter().map(Case::name).collect();
        anyhow::bail!("no case contains {:?}; there are {}", settings.filter, names.join(", "));
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use longshore_engine::kernels::{Isa, Rule};

    use super::*;

    #[test]
    fn every_case_and_its_limit_run_on_a_part_of_a_shard() {
        let pool = ThreadPool::new(2).unwrap();
        let mut arrays = Arrays::allocate(2 * BLOCK, &pool).unwrap();
        for case in Case::list(true) {
            arrays.time(&pool, case, true).unwrap();
            arrays.time(&pool, case, false).unwrap();
            let Case::Update(update) = case else { continue };
            let (_, state, _) = arrays.shards[0].cut(update.shape());
            for block in 0..2 {
                state.as_ref().with_master(Isa::detect(), block, |weights| {
                    assert!(weights.iter().all(|w| (0.1..0.6).contains(w)), "{}", case.name());
                });
            }
        }
        arrays.prepare(&pool, Formats::default());
        let (isa, formats) = (Isa::detect(), Formats::default());
        let case = Update { rule: Rule::AdamW, wire: Dtype::Bf16, isa, formats, images: Images::Plain };
        let before = arrays.shards[0].first.bytes().to_vec();
        arrays.pass(&pool, case);
        assert_ne!(arrays.shards[0].first.bytes(), before, "nothing was updated");
    }

    #[test]
    fn each_case_is_told_before_the_next_one_is_measured() {
        let settings =
            Settings { params: Some(1 << 20), rounds: 3, filter: "adamw/bf16/scalar".into(), all: false };
        let (begun, mut told) = (Instant::now(), Vec::new());
        run(&settings, |measured| {
            let of_rounds: f64 = measured.times.iter().chain(&measured.limits).sum();
            told.push((
                measured.case.clone(),
                measured.threads,
                measured.times.len(),
                of_rounds,
                begun.elapsed(),
            ));
        })
        .unwrap();
        let names = names(&settings).unwrap();
        assert_eq!(told.len() % names.len(), 0);
        assert!(told.iter().all(|(case, _, rounds, ..)| names.contains(case) && *rounds == 3), "{told:?}");
        for pair in told.windows(2) {
            assert!(
                (pair[1].4 - pair[0].4).as_secs_f64() >= pair[1].3,
                "measured before the other was told: {told:?}"
            );
        }
    }

    #[test]
    fn an_unknown_filter_names_the_cases() {
        let settings = |filter: &str| Settings { params: None, rounds: 9, filter: filter.into(), all: false };
        assert_eq!(selected(&settings("lion")).unwrap().len(), 1);
        let refused = selected(&settings("adamx")).unwrap_err().to_string();
        assert!(refused.contains("adamw/bf16/"), "{refused}");
    }
}
