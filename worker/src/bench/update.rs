//! `longshore bench update`: the fused update of many parameters, as a server does it, beside its memory traffic.

use std::time::Instant;

use anyhow::Context;
use longshore_engine::{
    kernels::{self, Gradient, Hyper, ImageMut, Isa, Rule, Scalars, State},
    memory::{Region, Slab},
    threads::{Pool, available_threads},
};
use longshore_proto::{
    Dtype,
    limits::{BLOCK_ELEMENTS, DEFAULT_SHARD_ELEMENTS},
};

use super::{Measured, limit};

pub(super) const BLOCK: usize = BLOCK_ELEMENTS as usize;
const SHARD: usize = DEFAULT_SHARD_ELEMENTS as usize;
/// Gradient and image in the widest format, and three fp32 arrays.
const BYTES_PER_PARAM: u64 = 20;
/// Enough to leave every cache: 5.6 GB go through memory in a round.
const DEFAULT_PARAMS: u64 = 200_000_000;

pub(crate) struct Settings {
    /// None: 200 million, or what half of the available memory holds.
    pub(crate) params: Option<u64>,
    pub(crate) rounds: usize,
    /// Only cases whose name contains this.
    pub(crate) filter: String,
    /// Every rule with every format and instruction set.
    pub(crate) all: bool,
}

/// Something to measure. A new dimension, as the precision of the state, is a field here, its bytes in `shape` and
/// its kernel call in `pass`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Case {
    rule: Rule,
    /// Of gradient and image.
    wire: Dtype,
    isa: Isa,
}

/// Bytes an element of each array takes. What a case and its limit have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shape {
    pub(super) gradient: usize,
    /// Master weights and the state slots; 0 where the rule has none.
    pub(super) state: [usize; 3],
    pub(super) image: usize,
}

pub(super) struct Arrays {
    pub(super) shards: Vec<Shard>,
}

pub(super) struct Shard {
    pub(super) len: usize,
    /// Room for fp32; a 16-bit case uses the first half.
    pub(super) gradient: Region,
    pub(super) master: Region,
    pub(super) first: Region,
    pub(super) second: Region,
    /// As for `gradient`.
    pub(super) image: Region,
}

impl Case {
    fn name(&self) -> String {
        format!("{}/{}/{}", self.rule, self.wire, self.isa)
    }

    fn shape(&self) -> Shape {
        let wire = self.wire.bytes() as usize;
        let slot = |index: usize| if index < self.rule.state_slots() { 4 } else { 0 };
        Shape { gradient: wire, state: [4, slot(0), slot(1)], image: wire }
    }

    /// AdamW in every form and the other rules in the fastest; or everything.
    fn list(all: bool) -> Vec<Case> {
        let (best, mut cases) = (Isa::detect(), Vec::new());
        for rule in Rule::ALL {
            for wire in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
                for isa in Isa::available().into_iter().rev() {
                    if all || rule == Rule::AdamW || (wire, isa) == (Dtype::Bf16, best) {
                        cases.push(Case { rule, wire, isa });
                    }
                }
            }
        }
        cases
    }
}

impl Shape {
    /// Bytes through memory for each parameter: the state is read and written.
    fn bytes(&self) -> usize {
        self.gradient + 2 * self.state.iter().sum::<usize>() + self.image
    }
}

impl Arrays {
    /// In shards, as a server holds them, touched by the threads that will use them.
    fn allocate(params: usize, pool: &Pool) -> anyhow::Result<Arrays> {
        let mut lengths = vec![SHARD; params / SHARD];
        lengths.extend((!params.is_multiple_of(SHARD)).then_some(params % SHARD));
        let sizes: Vec<usize> = lengths.iter().flat_map(|&len| [len * 4; 5]).collect();
        let slab = Slab::allocate(Slab::bytes_for(sizes.iter().copied()))?;
        let mut regions = slab.carve(&sizes, pool)?.into_iter();
        let mut next = || regions.next().context("a region was carved for every size");
        let mut shards = Vec::new();
        for len in lengths {
            let mut shard = Shard {
                len,
                gradient: next()?,
                master: next()?,
                first: next()?,
                second: next()?,
                image: next()?,
            };
            shard.fill(pool);
            shards.push(shard);
        }
        Ok(Arrays { shards })
    }

    /// One step of all parameters.
    fn pass(&mut self, pool: &Pool, case: Case) {
        let hyper = Hyper { lr: 1e-6, momentum: 0.9, weight_decay: 0.0, ..Hyper::default() };
        let scalars = Scalars::new(case.rule, &hyper, 10, 1.0);
        for shard in &mut self.shards {
            let blocks = shard.blocks(case);
            pool.blocks(blocks, |(gradient, state, image)| {
                kernels::update(case.isa, &scalars, gradient, state, image, 0.0);
            });
        }
    }
}

impl Shard {
    /// Positive and far from denormal in every format and under every rule, however often they are updated: an
    /// instruction that meets a denormal or NaN takes another time.
    fn fill(&mut self, pool: &Pool) {
        let gradient = self.gradient.u16_mut().chunks_mut(2 * BLOCK);
        pool.blocks(gradient.collect(), |part: &mut [u16]| {
            // As f16 about 1, as bf16 and f32 about 0.008.
            part.iter_mut()
                .enumerate()
                .for_each(|(at, bits)| *bits = 0x3C00 | ((at * 40503) >> 7 & 0x7F) as u16);
        });
        let values = [(&mut self.master, 0.5), (&mut self.first, 0.01), (&mut self.second, 0.001)];
        for (region, value) in values {
            pool.blocks(region.f32_mut().chunks_mut(BLOCK).collect(), |part: &mut [f32]| part.fill(value));
        }
    }

    fn blocks(&mut self, case: Case) -> Vec<(Gradient<'_>, State<'_>, ImageMut<'_>)> {
        let gradient = match case.wire {
            Dtype::F32 => Gradient::F32(self.gradient.f32()),
            Dtype::F16 => Gradient::F16(&self.gradient.u16()[..self.len]),
            Dtype::Bf16 => Gradient::Bf16(&self.gradient.u16()[..self.len]),
        };
        let images: Vec<ImageMut<'_>> = match case.wire {
            Dtype::F32 => self.image.f32_mut().chunks_mut(BLOCK).map(ImageMut::F32).collect(),
            Dtype::F16 => self.image.u16_mut()[..self.len].chunks_mut(BLOCK).map(ImageMut::F16).collect(),
            Dtype::Bf16 => self.image.u16_mut()[..self.len].chunks_mut(BLOCK).map(ImageMut::Bf16).collect(),
        };
        let slots = case.rule.state_slots();
        let mut master = self.master.f32_mut().chunks_mut(BLOCK);
        let mut first = self.first.f32_mut()[..if slots > 0 { self.len } else { 0 }].chunks_mut(BLOCK);
        let mut second = self.second.f32_mut()[..if slots > 1 { self.len } else { 0 }].chunks_mut(BLOCK);
        let blocks = images.into_iter().enumerate().map(|(index, image)| {
            let state = State {
                master: master.next().unwrap_or_default(),
                first: first.next().unwrap_or_default(),
                second: second.next().unwrap_or_default(),
            };
            (gradient.slice(index * BLOCK..(index + 1) * BLOCK), state, image)
        });
        blocks.collect()
    }
}

/// AdamW with bf16 in its fastest form on all threads, and nothing around it.
pub(super) struct Bare {
    arrays: Arrays,
    pool: Pool,
}

impl Bare {
    pub(super) fn new(params: usize) -> anyhow::Result<Bare> {
        let params = fitting(Some(params as u64), longshore_server::config::available_memory())?;
        let pool = Pool::new(available_threads())?;
        let arrays = Arrays::allocate(params, &pool)?;
        Ok(Bare { arrays, pool })
    }

    pub(super) fn pass(&mut self) {
        self.arrays.pass(&self.pool, Case { rule: Rule::AdamW, wire: Dtype::Bf16, isa: Isa::detect() });
    }
}

/// Measures every case with one thread and with all, round by round, each beside its limit.
pub(crate) fn run(settings: &Settings) -> anyhow::Result<Vec<Measured>> {
    let cases = selected(settings)?;
    let params = fitting(settings.params, longshore_server::config::available_memory())?;
    let mut pools = vec![Pool::new(1)?];
    if available_threads() > 1 {
        pools.push(Pool::new(available_threads())?);
    }
    let all = &pools[pools.len() - 1];
    // As a job's thread: left to the scheduler this one may share a core with the pool's second thread throughout.
    all.adopt_caller();
    let mut arrays = Arrays::allocate(params, all)?;
    let mut measured = Vec::new();
    for case in &cases {
        measured.extend(pools.iter().map(|pool| Measured {
            bench: "update",
            case: case.name(),
            threads: pool.threads(),
            bytes: (params * case.shape().bytes()) as u64,
            params: params as u64,
            times: Vec::new(),
            limits: Vec::new(),
        }));
    }
    let progress = indicatif::ProgressBar::new((settings.rounds * measured.len()) as u64);
    for round in 0..settings.rounds {
        for (index, measured) in measured.iter_mut().enumerate() {
            let (case, pool) = (cases[index / pools.len()], &pools[index % pools.len()]);
            // By turns, so that neither always follows the other.
            let limit_first = round % 2 == 0;
            for is_limit in [limit_first, !limit_first] {
                let begun = Instant::now();
                if is_limit {
                    limit::pass(&mut arrays, pool, case.shape());
                    measured.limits.push(begun.elapsed().as_secs_f64());
                } else {
                    arrays.pass(pool, case);
                    measured.times.push(begun.elapsed().as_secs_f64());
                }
            }
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    Ok(measured)
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

/// Whole blocks, at least one.
fn fitting(asked: Option<u64>, available: u64) -> anyhow::Result<usize> {
    let blocks = match asked {
        Some(params) => params / BLOCK_ELEMENTS,
        None => DEFAULT_PARAMS.min(available / 2 / BYTES_PER_PARAM) / BLOCK_ELEMENTS,
    };
    let params = blocks.max(1) * BLOCK_ELEMENTS;
    let need = params.saturating_mul(BYTES_PER_PARAM);
    if need > available {
        let largest = available / BYTES_PER_PARAM;
        anyhow::bail!(
            "{params} parameters take {need} bytes, but {available} are available: ask for --params of at most {largest}"
        );
    }
    Ok(usize::try_from(params)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_and_its_limit_run_on_a_part_of_a_shard() {
        let pool = Pool::new(2).unwrap();
        let mut arrays = Arrays::allocate(2 * BLOCK, &pool).unwrap();
        for case in Case::list(true) {
            limit::pass(&mut arrays, &pool, case.shape());
            arrays.pass(&pool, case);
            let shard = &arrays.shards[0];
            let weights = shard.master.f32();
            assert!(weights.iter().all(|w| (0.1..0.6).contains(w)), "{}: {:?}", case.name(), &weights[..4]);
            assert!(shard.first.f32().iter().all(|&m| m > 1e-6), "{}", case.name());
        }
    }

    #[test]
    fn the_default_fits_half_of_memory_and_more_than_all_is_refused() {
        assert_eq!(fitting(None, 1 << 40).unwrap(), 200_000_000 / BLOCK * BLOCK);
        assert!(fitting(None, 1 << 30).unwrap() * 40 <= 1 << 30);
        let refused = fitting(Some(1_000_000_000), 1 << 30).unwrap_err().to_string();
        assert!(refused.contains("at most 53687091"), "{refused}");
    }

    #[test]
    fn an_unknown_filter_names_the_cases() {
        let settings = |filter: &str| Settings { params: None, rounds: 9, filter: filter.into(), all: false };
        assert_eq!(selected(&settings("lion")).unwrap().len(), 1);
        let refused = selected(&settings("adamx")).unwrap_err().to_string();
        assert!(refused.contains("adamw/bf16/"), "{refused}");
    }
}
