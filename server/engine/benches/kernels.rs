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

/// AdamW with low-precision state on a bf16 wire.
struct Low {
    gradient: Vec<u16>,
    master: Vec<f32>,
    master_bf16: Vec<u16>,
    bf16: [Vec<u16>; 2],
    codes: [Vec<u8>; 2],
    scales: [Vec<f32>; 2],
    image: Vec<u16>,
    at: usize,
}

/// The formats of the benches, by name.
const LOW: [(&str, MasterFormat, StateFormat); 3] = [
    ("moments_bf16", MasterFormat::F32, StateFormat::Bf16),
    ("moments_block8", MasterFormat::F32, StateFormat::Block8),
    ("moments_block8_master_bf16", MasterFormat::Bf16, StateFormat::Block8),
];

impl Low {
    fn new(count: usize) -> Low {
        let blocks = count / QUANTIZATION_BLOCK;
        Low {
            gradient: vec![0x3C00; count],
            master: vec![0.5; count],
            master_bf16: vec![0x3F00; count],
            bf16: [vec![0x3C24; count], vec![0x3A83; count]],
            // Codes of all decades, as real state has.
            codes: [0, 1].map(|_| (0..count).map(|i| (i * 7) as u8).collect()),
            scales: [vec![0.01; blocks], vec![0.001; blocks]],
            image: vec![1; count],
            at: 0,
        }
    }

    /// Steps the next block, starting over at the end.
    fn update(&mut self, isa: Isa, scalars: &Scalars, master: MasterFormat, moments: StateFormat) {
        let part = self.at..self.at + BLOCK;
        let blocks = part.start / QUANTIZATION_BLOCK..part.end / QUANTIZATION_BLOCK;
        self.at = part.end % self.gradient.len();
        let ([bf16_first, bf16_second], [first_codes, second_codes]) = (&mut self.bf16, &mut self.codes);
        let [first_scales, second_scales] = &mut self.scales;
        let (first, second) = match moments {
            StateFormat::Block8 => (
                MomentMut::Block8 {
                    codes: &mut first_codes[part.clone()],
                    scales: &mut first_scales[blocks.clone()],
                },
                MomentMut::Block8 {
                    codes: &mut second_codes[part.clone()],
                    scales: &mut second_scales[blocks],
                },
            ),
            _ => (
                MomentMut::Bf16(&mut bf16_first[part.clone()]),
                MomentMut::Bf16(&mut bf16_second[part.clone()]),
            ),
        };
        let master = match master {
            MasterFormat::F32 => MasterMut::F32(&mut self.master[part.clone()]),
            MasterFormat::Bf16 => MasterMut::Bf16(&mut self.master_bf16[part.clone()]),
        };
        let (state, random) = (
            StateLow { master, first, second },
            Random { seed: 1, step: 10, first_element: part.start as u64 },
        );
        let gradient = Gradient::Bf16(&self.gradient[part.clone()]);
        update_low(
            isa,
            &[(0..BLOCK, scalars)],
            gradient,
            state,
            ImageMut::Bf16(&mut self.image[part]),
            0.0,
            random,
        );
    }
}

/// Low-precision AdamW through memory and, as `cached`, on one block: the difference is memory's. To compare with
/// `update_memory/bf16`.
fn update_low_precision(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("update_low");
    group.throughput(Throughput::Elements(BLOCK as u64));
    // Without decay, as in `update_block`.
    let scalars = Scalars::new(Rule::AdamW, &Hyper { weight_decay: 0.0, ..Hyper::default() }, 10, 1.0);
    for isa in Isa::available() {
        for (name, master, moments) in LOW {
            for (place, count) in [("memory", MEMORY), ("cached", BLOCK)] {
                let mut arrays = Low::new(count);
                group.bench_function(BenchmarkId::new(format!("{name}/{place}"), isa), |bencher| {
                    bencher.iter(|| arrays.update(isa, &scalars, master, moments));
                });
            }
        }
    }
    group.finish();
}

/// 8-bit moments in cache, to and from f32: what an update of them does beside its rule and its random bits.
fn codes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("codes");
    group.throughput(Throughput::Elements(BLOCK as u64));
    let mut low = Low::new(BLOCK);
    let mut floats = vec![0.0; BLOCK];
    for isa in Isa::available() {
        for (index, code) in [Code::Signed, Code::Unsigned].into_iter().enumerate() {
            let (codes, scales) = (&mut low.codes[index], &mut low.scales[index]);
            group.bench_function(BenchmarkId::new(format!("decode/{code:?}"), isa), |bencher| {
                bencher.iter(|| decode(isa, code, Moment::Block8 { codes, scales }, black_box(&mut floats)));
            });
            group.bench_function(BenchmarkId::new(format!("encode/{code:?}"), isa), |bencher| {
                bencher.iter(|| encode(isa, code, black_box(&floats), MomentMut::Block8 { codes, scales }));
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

criterion_group!(benches, update_memory, update_low_precision, codes, update_block, sums);
criterion_main!(benches);
