//! How fast the kernels are: in memory against a loop that moves the same bytes, and in cache against each other.
//! `cargo bench -p longshore-engine --bench kernels -- update_memory/bf16`

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use longshore_engine::kernels::*;

const BLOCK: usize = 65_536;
/// 1 GiB of arrays: beyond the caches of any CPU.
const MEMORY: usize = 1024 * BLOCK;

struct Arrays {
    gradient: Vec<u16>,
    master: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    image: Vec<u16>,
    at: usize,
}

impl Arrays {
    fn new(count: usize) -> Arrays {
        Arrays {
            gradient: vec![0x3C00; count],
            master: vec![0.5; count],
            first: vec![0.01; count],
            second: vec![0.001; count],
            // Not 0: zeroed pages would only be given out as they are first written.
            image: vec![1; count],
            at: 0,
        }
    }

    /// Steps the next block, starting over at the end.
    fn update(&mut self, isa: Isa, scalars: &Scalars, bf16: bool) {
        let part = self.at..self.at + BLOCK;
        self.at = part.end % self.master.len();
        let gradient = &self.gradient[part.clone()];
        let image = &mut self.image[part.clone()];
        let (gradient, image) = if bf16 {
            (Gradient::Bf16(gradient), ImageMut::Bf16(image))
        } else {
            (Gradient::F16(gradient), ImageMut::F16(image))
        };
        let slots = scalars.rule().state_slots();
        let state = State {
            master: &mut self.master[part.clone()],
            first: &mut self.first[part.clone()],
            second: if slots > 1 { &mut self.second[part] } else { &mut [] },
        };
        update(isa, scalars, gradient, state, image, 0.0);
    }

    /// What an update of the next block moves, with next to no arithmetic: 14 bytes in and 14 out per parameter.
    fn traffic(&mut self) {
        let part = self.at..self.at + BLOCK;
        self.at = part.end % self.master.len();
        let state = self.master[part.clone()].iter_mut().zip(&mut self.first[part.clone()]);
        let state = state.zip(&mut self.second[part.clone()]);
        let halves = self.gradient[part.clone()].iter().zip(&mut self.image[part]);
        for (((master, first), second), (gradient, image)) in state.zip(halves) {
            let gradient = f32::from_bits(u32::from(*gradient) << 16);
            *master += gradient;
            *first += gradient;
            *second += gradient;
            *image = (master.to_bits() >> 16) as u16;
        }
    }
}

/// AdamW through memory, on every instruction set.
fn update_memory(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("update_memory");
    group.throughput(Throughput::Elements(BLOCK as u64));
    let mut arrays = Arrays::new(MEMORY);
    group.bench_function("traffic", |bencher| bencher.iter(|| arrays.traffic()));
    let scalars = Scalars::new(Rule::AdamW, &Hyper::default(), 10, 1.0);
    for isa in Isa::available() {
        for (name, bf16) in [("bf16", true), ("f16", false)] {
            let mut arrays = Arrays::new(MEMORY);
            group.bench_function(BenchmarkId::new(name, isa), |bencher| {
                bencher.iter(|| arrays.update(isa, &scalars, bf16));
            });
        }
    }
    group.finish();
}

/// Each rule on one block, which stays in cache.
fn update_block(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("update_block");
    group.throughput(Throughput::Elements(BLOCK as u64));
    // Without decay: thousands of steps on one gradient would reach the weights where the two cancel, and with them
    // denormals, on which AdamW takes two to five times as long.
    let hyper = Hyper { momentum: 0.9, weight_decay: 0.0, ..Hyper::default() };
    for isa in Isa::available() {
        for rule in Rule::ALL {
            let scalars = Scalars::new(rule, &hyper, 10, 1.0);
            let mut arrays = Arrays::new(BLOCK);
            group.bench_function(BenchmarkId::new(format!("{rule:?}"), isa), |bencher| {
                bencher.iter(|| arrays.update(isa, &scalars, true));
            });
        }
    }
    group.finish();
}

/// Everything that is not an update, on one block of bf16.
fn sums(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("sums");
    group.throughput(Throughput::Elements(BLOCK as u64));
    let mut arrays = Arrays::new(BLOCK);
    let Arrays { gradient, master, image, .. } = &mut arrays;
    let gradient = Gradient::Bf16(gradient);
    for isa in Isa::available() {
        group.bench_function(BenchmarkId::new("widen", isa), |bencher| {
            bencher.iter(|| widen(isa, black_box(gradient), master));
        });
        group.bench_function(BenchmarkId::new("accumulate", isa), |bencher| {
            bencher.iter(|| accumulate(isa, black_box(gradient), master));
        });
        group.bench_function(BenchmarkId::new("figures", isa), |bencher| {
            bencher.iter(|| figures(isa, black_box(gradient)));
        });
        group.bench_function(BenchmarkId::new("accumulate_figures", isa), |bencher| {
            bencher.iter(|| accumulate_figures(isa, black_box(gradient), master));
        });
        group.bench_function(BenchmarkId::new("cast", isa), |bencher| {
            bencher.iter(|| cast(isa, black_box(&*master), ImageMut::Bf16(image)));
        });
    }
    group.finish();
}

criterion_group!(benches, update_memory, update_block, sums);
criterion_main!(benches);
