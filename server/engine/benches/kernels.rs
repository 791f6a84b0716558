//! How fast the kernels are: in memory against a loop that moves the same bytes, and in cache against each other. Run
//! it with `cargo bench -p longshore-engine --bench kernels -- update_memory/bf16`.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use longshore_engine::{
    kernels::*,
    memory::{Region, Slab},
    tier::{Shape, StateMut},
};
use longshore_proto::Formats;

const BLOCK: usize = 65_536;
/// 1 GiB of arrays, which is beyond the caches of any CPU.
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
            // The bytes are not 0, since zeroed pages are only given out as they are first written.
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
            (Gradient::bf16(gradient), ImageMut::Bf16(image))
        } else {
            (Gradient::f16(gradient), ImageMut::F16(image))
        };
        let slots = scalars.rule().state_slots();
        let state = State {
            master: &mut self.master[part.clone()],
            first: &mut self.first[part.clone()],
            second: if slots > 1 { &mut self.second[part] } else { &mut [] },
        };
        update(isa, scalars, gradient, state, image);
    }

    /// Moves what an update of the next block moves, with next to no arithmetic: 14 bytes in and 14 out per
    /// parameter.
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

/// Runs AdamW through memory on every instruction set.
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

/// AdamW with low-precision state on a bf16 wire. The arrays begin on cache lines, as a server's memory does:
/// elsewhere the image could not be written past the caches, and vectors would be loaded from two lines at a time.
struct Low {
    shape: Shape,
    /// Gradient, master weights, first and second moments, image.
    regions: Vec<Region>,
    at: usize,
}

/// The formats of the benches, by name.
const LOW: [(&str, MasterFormat, StateFormat); 3] = [
    ("moments_bf16", MasterFormat::F32, StateFormat::Bf16),
    ("moments_block8", MasterFormat::F32, StateFormat::Block8),
    ("moments_block8_master_bf16", MasterFormat::Bf16, StateFormat::Block8),
];

impl Low {
    fn new(count: usize, master: MasterFormat, state: StateFormat) -> Low {
        let shape = Shape::new(Rule::AdamW, Formats { state, master, seed: 1 });
        let [weights, first, second] = shape.arrays(count);
        let sizes = [2 * count, weights, first, second, 2 * count];
        let mut regions = Slab::allocate(Slab::bytes_for(sizes)).unwrap().carve_here(&sizes);
        // The bytes are not 0, since zeroed pages are only given out as they are first written.
        regions[4].u16_mut().fill(1);
        regions[0].u16_mut().fill(0x3C00);
        let mut low = Low { shape, regions, at: 0 };
        for _ in 0..count / BLOCK {
            let (_, mut state, _) = low.next();
            let state = state.low();
            match state.master {
                MasterMut::F32(master) => master.fill(0.5),
                MasterMut::Bf16(master) => master.fill(0x3F00),
            }
            // Codes of all decades, as real state has.
            let values: Vec<f32> = (0..BLOCK).map(|at| 10f32.powi(-(at as i32 % 7)) / 100.0).collect();
            encode(Isa::detect(), Code::Signed, &values, state.first);
            encode(Isa::detect(), Code::Unsigned, &values, state.second);
        }
        low
    }

    /// The next block's gradient, state and image, starting over at the end.
    fn next(&mut self) -> (&[u16], StateMut<'_>, &mut [u16]) {
        let [gradient, master, first, second, image] = &mut self.regions[..] else { unreachable!() };
        let block = self.at;
        self.at = (block + 1) % (gradient.u16().len() / BLOCK);
        let elements = block * BLOCK..(block + 1) * BLOCK;
        let mut bytes = self.shape.block().into_iter();
        let arrays = [master, first, second].map(|region| {
            let bytes = bytes.next().unwrap();
            &mut region.bytes_mut()[block * bytes..(block + 1) * bytes]
        });
        (&gradient.u16()[elements.clone()], StateMut::new(self.shape, arrays), &mut image.u16_mut()[elements])
    }

    fn update(&mut self, isa: Isa, scalars: &Scalars) {
        let random = Random { seed: 1, step: 10, first_element: (self.at * BLOCK) as u64 };
        let (gradient, mut state, image) = self.next();
        let (gradient, image) = (Gradient::bf16(gradient), ImageMut::Bf16(image));
        update_low(isa, &[(0..BLOCK, scalars)], gradient, state.low(), image, random);
    }
}

/// Runs low-precision AdamW through memory and, as `cached`, on one block. The difference is the cost of memory.
/// Compare `memory` with `update_memory/bf16`.
fn update_low_precision(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("update_low");
    group.throughput(Throughput::Elements(BLOCK as u64));
    // There is no decay, as in `update_block`.
    let scalars = Scalars::new(Rule::AdamW, &Hyper { weight_decay: 0.0, ..Hyper::default() }, 10, 1.0);
    for isa in Isa::available() {
        for (name, master, moments) in LOW {
            for (place, count) in [("memory", MEMORY), ("cached", BLOCK)] {
                let mut arrays = Low::new(count, master, moments);
                group.bench_function(BenchmarkId::new(format!("{name}/{place}"), isa), |bencher| {
                    bencher.iter(|| arrays.update(isa, &scalars));
                });
            }
        }
    }
    group.finish();
}

/// Converts 8-bit moments in cache to and from f32, which an update of them does beside its rule and its random bits.
fn codes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("codes");
    group.throughput(Throughput::Elements(BLOCK as u64));
    let mut low = Low::new(BLOCK, MasterFormat::F32, StateFormat::Block8);
    let (_, mut state, _) = low.next();
    let StateLow { master, first, second } = state.low();
    let (
        MasterMut::F32(floats),
        MomentMut::Block8 { codes: a, scales: b },
        MomentMut::Block8 { codes: c, scales: d },
    ) = (master, first, second)
    else {
        unreachable!("as asked for")
    };
    for isa in Isa::available() {
        for (code, codes, scales) in [(Code::Signed, &mut *a, &mut *b), (Code::Unsigned, &mut *c, &mut *d)] {
            group.bench_function(BenchmarkId::new(format!("decode/{code:?}"), isa), |bencher| {
                bencher.iter(|| decode(isa, code, Moment::Block8 { codes, scales }, black_box(&mut *floats)));
            });
            group.bench_function(BenchmarkId::new(format!("encode/{code:?}"), isa), |bencher| {
                bencher.iter(|| encode(isa, code, black_box(floats), MomentMut::Block8 { codes, scales }));
            });
        }
    }
    group.finish();
}

/// Runs each rule on one block, which stays in cache.
fn update_block(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("update_block");
    group.throughput(Throughput::Elements(BLOCK as u64));
    // There is no decay: thousands of steps on one gradient would reach the weights where the two cancel, and with
    // them denormals, on which AdamW takes two to five times as long.
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

/// Runs everything that is not an update, on one block of bf16.
fn sums(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("sums");
    group.throughput(Throughput::Elements(BLOCK as u64));
    let mut arrays = Arrays::new(BLOCK);
    let Arrays { gradient, master, image, .. } = &mut arrays;
    let gradient = Gradient::bf16(gradient);
    for isa in Isa::available() {
        group.bench_function(BenchmarkId::new("widen", isa), |bencher| {
            bencher.iter(|| widen(isa, black_box(gradient), master));
        });
        group.bench_function(BenchmarkId::new("accumulate", isa), |bencher| {
            bencher.iter(|| accumulate(isa, black_box(gradient), master));
        });
        group.bench_function(BenchmarkId::new("statistics", isa), |bencher| {
            bencher.iter(|| statistics(isa, black_box(gradient)));
        });
        group.bench_function(BenchmarkId::new("accumulate_statistics", isa), |bencher| {
            bencher.iter(|| accumulate_statistics(isa, black_box(gradient), master));
        });
        group.bench_function(BenchmarkId::new("cast", isa), |bencher| {
            bencher.iter(|| cast(isa, black_box(&*master), ImageMut::Bf16(image)));
        });
    }
    group.finish();
}

criterion_group!(benches, update_memory, update_low_precision, codes, update_block, sums);
criterion_main!(benches);
