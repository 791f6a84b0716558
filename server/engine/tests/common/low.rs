//! Reference for state in fewer bits: one call of the scalar kernels over the whole flat space. The kernels specify the
//! rounding, and have property tests of their own. Only the code around the kernels is independent here.

use std::ops::Range;

use longshore_engine::kernels::{
    Gradient, ImageMut, Isa, MasterMut, MomentMut, QUANTIZATION_BLOCK, Random, Scalars, StateLow, update_low,
};
use longshore_proto::{Commit, Dtype, JobSpec, MasterFormat, StateFormat};

use super::{BLOCK, encode, reference::multipliers};

#[derive(Clone)]
pub(crate) struct Low {
    master: Array,
    moments: [Array; 2],
}

#[derive(Clone)]
enum Array {
    Empty,
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    Block8 { codes: Vec<u8>, scales: Vec<f32> },
}

impl Low {
    pub(crate) fn new(spec: &JobSpec, initial: &[f32]) -> Low {
        let count = initial.len();
        let moment = |slot: usize| match spec.formats.state {
            _ if slot >= spec.rule.state_slots() => Array::Empty,
            StateFormat::F32 => Array::F32(vec![0.0; count]),
            StateFormat::Bf16 => Array::Bf16(vec![0; count]),
            StateFormat::Block8 => {
                Array::Block8 { codes: vec![0; count], scales: vec![0.0; count / QUANTIZATION_BLOCK] }
            }
        };
        let master = match spec.formats.master {
            MasterFormat::F32 => Array::F32(initial.to_vec()),
            MasterFormat::Bf16 => {
                Array::Bf16(initial.iter().map(|&x| half::bf16::from_f32(x).to_bits()).collect())
            }
        };
        Low { master, moments: [moment(0), moment(1)] }
    }

    pub(crate) fn master(&self) -> Vec<f32> {
        match &self.master {
            Array::F32(x) => x.clone(),
            Array::Bf16(x) => x.iter().map(|&bits| half::bf16::from_bits(bits).to_f32()).collect(),
            _ => unreachable!("master weights are fp32 or bf16"),
        }
    }

    /// Makes a step. Returns the image.
    pub(crate) fn step(
        &mut self,
        spec: &JobSpec,
        groups: &[u32],
        (applied, times): (u64, &[Option<u64>]),
        gradient: &[f32],
        commit: &Commit,
    ) -> Vec<u8> {
        let before = self.clone();
        let multipliers = multipliers(spec, commit);
        let scalars = |element: usize| {
            let (group, multiplier) = (groups[element] as usize, multipliers[element]);
            let t = times[element].unwrap_or(applied);
            let scalars = Scalars::new(spec.rule, &commit.groups[group], t, multiplier);
            let ahead = commit.correction.look_ahead().get(group);
            ahead.map_or(scalars, |lr| scalars.looking_ahead(&commit.groups[group], t, *lr))
        };
        let elements: Vec<usize> = (0..groups.len()).collect();
        let alike = |&a: &usize, &b: &usize| {
            groups[a] == groups[b] && multipliers[a] == multipliers[b] && times[a] == times[b]
        };
        let runs = elements.chunk_by(alike).map(|run| (run[0]..run[0] + run.len(), scalars(run[0])));
        let runs: Vec<(Range<usize>, Scalars)> = runs.collect();
        let segments: Vec<_> = runs.iter().map(|(range, scalars)| (range.clone(), scalars)).collect();
        let random = Random { seed: spec.formats.seed, step: applied, first_element: 0 };
        let master = match &mut self.master {
            Array::F32(x) => MasterMut::F32(x),
            Array::Bf16(x) => MasterMut::Bf16(x),
            _ => unreachable!("master weights are fp32 or bf16"),
        };
        let [first, second] = self.moments.each_mut().map(|moment| match moment {
            Array::Empty => MomentMut::Empty,
            Array::F32(x) => MomentMut::F32(x),
            Array::Bf16(x) => MomentMut::Bf16(x),
            Array::Block8 { codes, scales } => MomentMut::Block8 { codes, scales },
        });
        let (mut wide, mut narrow) = (vec![0.0; gradient.len()], vec![0; gradient.len()]);
        let image = match spec.image_dtype {
            Dtype::F32 => ImageMut::F32(&mut wide),
            Dtype::F16 => ImageMut::F16(&mut narrow),
            Dtype::Bf16 => ImageMut::Bf16(&mut narrow),
        };
        let state = StateLow { master, first, second };
        update_low(Isa::Scalar, &segments, Gradient::f32(gradient), state, image, random);
        let mut image = match spec.image_dtype {
            Dtype::F32 => encode(&wide, Dtype::F32),
            Dtype::F16 | Dtype::Bf16 => narrow.iter().flat_map(|bits| bits.to_le_bytes()).collect(),
        };
        if times.contains(&None) {
            let (plain, width) =
                (encode(&before.master(), spec.image_dtype), spec.image_dtype.bytes() as usize);
            for element in (0..times.len()).filter(|&element| times[element].is_none()) {
                self.master.restore(&before.master, element);
                self.moments.iter_mut().zip(&before.moments).for_each(|(one, was)| one.restore(was, element));
                let place = element * width..(element + 1) * width;
                image[place.clone()].copy_from_slice(&plain[place]);
            }
        }
        image
    }

    pub(crate) fn hash(&self, block: usize) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        for array in [&self.master, &self.moments[0], &self.moments[1]] {
            hasher.update(&array.block(block));
        }
        *hasher.finalize().as_bytes()
    }
}

impl Array {
    /// Gives an element its bits of `before`, as for an element that a step leaves out.
    fn restore(&mut self, before: &Array, element: usize) {
        match (self, before) {
            (Array::Empty, Array::Empty) => {}
            (Array::F32(x), Array::F32(was)) => x[element] = was[element],
            (Array::Bf16(x), Array::Bf16(was)) => x[element] = was[element],
            _ => unreachable!("8-bit moments have no element of their own"),
        }
    }

    /// Returns a block's bytes. With 8 bits an element, the codes come first and the scales follow.
    fn block(&self, block: usize) -> Vec<u8> {
        let range = block * BLOCK..(block + 1) * BLOCK;
        match self {
            Array::Empty => Vec::new(),
            Array::F32(x) => encode(&x[range], Dtype::F32),
            Array::Bf16(x) => x[range].iter().flat_map(|bits| bits.to_le_bytes()).collect(),
            Array::Block8 { codes, scales } => {
                let groups = BLOCK / QUANTIZATION_BLOCK;
                let scales = &scales[block * groups..(block + 1) * groups];
                [&codes[range], &encode(scales, Dtype::F32)].concat()
            }
        }
    }
}
