//! `longshore bench update`: times a server's fused update of many parameters, and the same memory traffic without
//! arithmetic.

mod cases;

use std::time::Instant;

use longshore_engine::{
    kernels::{self, Gradient, Hyper, ImageMut, Random, Scalars},
    threads::{ThreadPool, available_threads},
    tier::StateMut,
};
use longshore_proto::{Dtype, Formats};

use self::cases::Images;
pub(super) use self::cases::Update;
use super::{
    Measured,
    arrays::{Arrays, BLOCK, Shard, fitting, gradient_of, move_bytes},
    head, median,
};
use crate::{output::Output, sizes::parse_count};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Parameters, as in 200M [default: 200M, or what half of the available memory holds]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    params: Option<u64>,
    /// Passes over all parameters; medians are shown
    #[arg(long, default_value_t = 9, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Only cases whose name contains this, as in adamw/bf16
    #[arg(long, default_value = "", value_name = "TEXT", hide_default_value = true)]
    filter: String,
    /// Every rule in every format on every instruction set, not AdamW alone
    #[arg(long)]
    all: bool,
}

impl Arrays {
    fn time(&mut self, pool: &ThreadPool, case: Update, is_limit: bool) -> f64 {
        self.prepare(pool, case.formats);
        let begun = Instant::now();
        match is_limit {
            true => move_bytes(self, pool, case.shape()),
            false => self.pass(pool, case),
        }
        begun.elapsed().as_secs_f64()
    }

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
        let block = |((gradient, state), image)| {
            let image = match case.wire {
                Dtype::F32 => ImageMut::F32(bytemuck::cast_slice_mut(image)),
                Dtype::F16 => ImageMut::F16(bytemuck::cast_slice_mut(image)),
                Dtype::Bf16 => ImageMut::Bf16(bytemuck::cast_slice_mut(image)),
            };
            (gradient_of(case.wire, gradient), state, image)
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

/// Measures every case and its limit, with one thread and with all, in rounds. Each case is printed at once, since all
/// of them take minutes.
pub(crate) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let cases = selected(args)?;
    let params = fitting(args.params, longshore_server::config::available_memory())?;
    let mut pools = vec![ThreadPool::new(1)?];
    if available_threads() > 1 {
        pools.push(ThreadPool::new(available_threads())?);
    }
    let all = &pools[pools.len() - 1];
    // The calling thread is bound to a core, as a job's compute thread is. Otherwise the scheduler might leave it on
    // the core of another thread of the pool all the time.
    all.adopt_caller();
    let mut arrays = Arrays::allocate(params, all)?;
    if !out.is_json() {
        say!("{}", head());
    }
    let rounds: usize = args.rounds.into();
    let progress = indicatif::ProgressBar::new((rounds * cases.len() * pools.len()) as u64);
    for &case in &cases {
        for pool in &pools {
            let mut measured = Measured {
                bench: "update",
                case: case.name(),
                threads: pool.threads(),
                bytes: (params / BLOCK * case.shape().block_bytes()) as u64,
                params: params as u64,
                times: Vec::new(),
                limits: Vec::new(),
            };
            for round in 0..rounds {
                // Case and limit take turns in going first.
                let limit_first = round % 2 == 0;
                for is_limit in [limit_first, !limit_first] {
                    let seconds = arrays.time(pool, case, is_limit);
                    if is_limit { &mut measured.limits } else { &mut measured.times }.push(seconds);
                }
                progress.inc(1);
            }
            progress.suspend(|| out.result(|| measured.json(), || measured.row()));
        }
    }
    progress.finish_and_clear();
    Ok(())
}

fn selected(args: &Args) -> anyhow::Result<Vec<Update>> {
    let list = Update::list(args.all);
    let cases: Vec<Update> = list.iter().copied().filter(|case| case.name().contains(&args.filter)).collect();
    if cases.is_empty() {
        let names: Vec<String> = list.iter().map(Update::name).collect();
        anyhow::bail!("no case contains {:?}; there are {}", args.filter, names.join(", "));
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
        for case in Update::list(true) {
            arrays.time(&pool, case, true);
            arrays.time(&pool, case, false);
            let (_, state, _) = arrays.shards[0].cut(case.shape());
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
    fn an_unknown_filter_names_the_cases() {
        let settings = |filter: &str| Args { params: None, rounds: 9, filter: filter.into(), all: false };
        assert_eq!(selected(&settings("lion")).unwrap().len(), 1);
        let refused = selected(&settings("adamx")).unwrap_err().to_string();
        assert!(refused.contains("adamw/bf16/"), "{refused}");
    }
}
