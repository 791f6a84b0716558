//! The expected result of a run: one loop without servers. Updates and sums of squares come from the engine's scalar
//! kernels. The engine's tests compare those kernels with formulas of their own.

use std::ops::Range;

use half::{bf16, f16};
use longshore_engine::kernels::{
    Gradient, ImageMut, Isa, Rule, Scalars, State as Arrays, statistics, update,
};
use longshore_proto::{Dtype, Param};
use longshore_worker::{DelayCorrection, LossScalerOptions};

use super::{
    files::State,
    scenario::{Batch, Delay, Model, Scale, Scenario},
};

const BLOCK: usize = 65536;

/// The result of one step. The loop and a run on servers must agree on every field.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub step: u64,
    pub reads: u64,
    pub scale: f64,
    pub skip: bool,
    /// The gradient norm. None for a skipped step.
    pub norm: Option<f64>,
    pub clip_coefficient: f64,
    pub scale_next: f64,
    /// Parameter and element of the first overflow.
    pub overflow: Option<String>,
    /// The losses as bits, by rank and micro-step.
    pub losses: Vec<u32>,
}

/// The result of a whole run.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    pub steps: Vec<Step>,
    pub applied: u64,
    pub state: State,
    /// Version and image at each evaluation: after each drain and at the end.
    pub images: Vec<(u64, Vec<u8>)>,
}

pub struct Reference<'a> {
    model: &'a dyn Model,
    plan: Scenario,
    params: Vec<Param>,
    ranges: Vec<Range<usize>>,
    /// The group of each flat element. A gap has the group of the parameter before it.
    groups: Vec<usize>,
    scaler: Scaler,
    master: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    applied: u64,
    /// The image of each version, from version 0. `scales` has the loss scale of the steps that read each version.
    images: Vec<Vec<u8>>,
    scales: Vec<f64>,
    steps: Vec<Step>,
    evaluated: Vec<(u64, Vec<u8>)>,
}

/// Runs the whole plan.
pub fn train(model: &dyn Model, plan: &Scenario) -> Trace {
    let mut reference = Reference::new(model, *plan);
    (0..plan.steps).for_each(|_| reference.step());
    reference.end()
}

impl<'a> Reference<'a> {
    pub fn new(model: &'a dyn Model, plan: Scenario) -> Reference<'a> {
        let params = model.params();
        let ranges = place(&params);
        let elements = ranges.last().expect("a parameter").end.div_ceil(BLOCK) * BLOCK;
        let (mut master, mut groups) = (vec![0.0; elements], vec![0; elements]);
        for (index, (param, range)) in params.iter().zip(&ranges).enumerate() {
            master[range.clone()].copy_from_slice(&model.initial(index));
            groups[range.start..].fill(param.group as usize);
        }
        let scaler = Scaler::new(plan.scale);
        Reference {
            images: vec![encode(&master, plan.image)],
            scales: vec![scaler.scale],
            first: vec![0.0; elements],
            second: vec![0.0; elements],
            applied: 0,
            steps: Vec::new(),
            evaluated: Vec::new(),
            model,
            plan,
            params,
            ranges,
            groups,
            scaler,
            master,
        }
    }

    /// Computes the next step.
    pub fn step(&mut self) {
        let step = self.steps.len() as u64 + 1;
        let reads = reads(step, self.plan.delay);
        let scale = self.scales[reads as usize];
        let (losses, gradient) = self.gradient(step, reads, scale);
        let bad = gradient.iter().position(|x| !x.is_finite());
        let contributions = if self.plan.on_worker { 1 } else { self.plan.micro_steps };
        let divisor = scale * f64::from(self.plan.world) * f64::from(contributions);
        let squares = |block| statistics(Isa::Scalar, Gradient::f32(block)).sum_squares;
        let norm = gradient.chunks(BLOCK).map(squares).sum::<f64>().sqrt() / divisor;
        let clip_coefficient = match self.plan.clip {
            Some(clip) if bad.is_none() => (clip / (norm + 1e-6)).min(1.0),
            _ => 1.0,
        };
        let correction = match self.plan.delay {
            Some(delay) if reads_of_next(step, delay) != step => delay.correction,
            _ => DelayCorrection::None,
        };
        match bad {
            Some(_) => {
                self.images.push(self.images[self.images.len() - 1].clone());
            }
            None => {
                self.update(step, &gradient, (clip_coefficient / divisor) as f32, correction);
            }
        }
        self.scaler.update(bad.is_some());
        self.scales.push(self.scaler.scale);
        if self.plan.evaluates_after(step) {
            self.evaluated.push((step, self.images[step as usize].clone()));
        }
        self.steps.push(Step {
            step,
            reads,
            scale,
            skip: bad.is_some(),
            norm: bad.is_none().then_some(norm),
            clip_coefficient,
            scale_next: self.scaler.scale,
            overflow: bad.map(|element| self.name(element)),
            losses,
        });
    }

    /// Sets the loss scale that an operator chose, for steps that read the newest version.
    pub fn choose_scale(&mut self, scale: f64) {
        self.scaler.scale = scale;
        self.scaler.min = self.scaler.min.min(scale);
        let (Some(newest), Some(step)) = (self.scales.last_mut(), self.steps.last_mut()) else { return };
        (*newest, step.scale_next) = (scale, scale);
    }

    pub fn end(mut self) -> Trace {
        let version = self.steps.len() as u64;
        self.evaluated.push((version, self.images[version as usize].clone()));
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
        let state = State { master: bits(self.master), first: bits(self.first), second: bits(self.second) };
        Trace { steps: self.steps, applied: self.applied, state, images: self.evaluated }
    }

    /// Returns the losses, and the gradient summed by micro-step and then by rank. With `on_worker` each rank sends the
    /// mean of its micro-steps.
    fn gradient(&self, step: u64, reads: u64, scale: f64) -> (Vec<u32>, Vec<f32>) {
        let (ranks, micro_steps) = (self.plan.world as usize, self.plan.micro_steps);
        let mut sent = vec![Vec::new(); ranks];
        let mut losses = vec![Vec::new(); ranks];
        let image = decode(&self.images[reads as usize], self.plan.image);
        let weights: Vec<Vec<f32>> = self.ranges.iter().map(|range| image[range.clone()].to_vec()).collect();
        for micro_step in 0..micro_steps {
            for rank in 0..self.plan.world {
                let batch = Batch { step, micro_step, rank };
                let (loss, gradients) = self.model.gradient(&weights, batch, scale);
                losses[rank as usize].push(loss.to_bits());
                let mut flat = vec![0.0; image.len()];
                for (range, gradient) in self.ranges.iter().zip(gradients) {
                    flat[range.clone()].copy_from_slice(&gradient);
                }
                sent[rank as usize].push(self.rounded(&flat));
            }
        }
        let contributions: Vec<Vec<f32>> = match self.plan.on_worker {
            true => sent.into_iter().map(|of_rank| self.rounded(&mean(of_rank))).collect(),
            false => {
                let in_order =
                    (0..micro_steps as usize).flat_map(|step| (0..ranks).map(move |rank| (rank, step)));
                in_order.map(|(rank, step)| sent[rank][step].clone()).collect()
            }
        };
        (losses.concat(), sum(contributions))
    }

    /// Rounds values to the dtype in which gradients are sent.
    fn rounded(&self, values: &[f32]) -> Vec<f32> {
        decode(&encode(values, self.plan.gradient), self.plan.gradient)
    }

    fn update(&mut self, step: u64, gradient: &[f32], multiplier: f32, correction: DelayCorrection) {
        self.applied += 1;
        let scalars = Scenario::hypers(step).into_iter().map(|hyper| {
            let scalars = Scalars::new(Rule::AdamW, &hyper, self.applied, multiplier);
            match correction {
                DelayCorrection::None => scalars,
                DelayCorrection::LookAhead => scalars.looking_ahead(&hyper, self.applied, hyper.lr),
            }
        });
        let scalars: Vec<Scalars> = scalars.collect();
        let mut state = Arrays { master: &mut self.master, first: &mut self.first, second: &mut self.second };
        let mut emitted = vec![0.0; gradient.len()];
        let mut start = 0;
        for run in self.groups.chunk_by(|a, b| a == b) {
            let range = start..start + run.len();
            start = range.end;
            let part = Gradient::f32(&gradient[range.clone()]);
            let image = ImageMut::F32(&mut emitted[range.clone()]);
            update(Isa::Scalar, &scalars[run[0]], part, state.slice(range), image);
        }
        self.images.push(encode(&emitted, self.plan.image));
    }

    fn name(&self, element: usize) -> String {
        let param = self.ranges.iter().position(|range| range.contains(&element)).expect("no padding");
        format!("{}, element {}", self.params[param].name, element - self.ranges[param].start)
    }
}

/// Sums in order, in fp32.
fn sum(gradients: Vec<Vec<f32>>) -> Vec<f32> {
    let add = |mut total: Vec<f32>, next: Vec<f32>| {
        total.iter_mut().zip(next).for_each(|(total, x)| *total += x);
        total
    };
    gradients.into_iter().reduce(add).expect("a gradient")
}

fn mean(gradients: Vec<Vec<f32>>) -> Vec<f32> {
    let share = 1.0 / gradients.len() as f32;
    sum(gradients).into_iter().map(|total| total * share).collect()
}

/// Returns each parameter's range. Each start is the next multiple of 64 elements.
fn place(params: &[Param]) -> Vec<Range<usize>> {
    let mut next = 0;
    let place = |param: &Param| {
        let start = next;
        let end = start + param.shape.iter().product::<u64>() as usize;
        next = end.next_multiple_of(64);
        start..end
    };
    params.iter().map(place).collect()
}

/// Returns the version that a step computes with.
fn reads(step: u64, delay: Option<Delay>) -> u64 {
    match delay {
        None => step - 1,
        Some(delay) if step <= delay.warmup => step - 1,
        Some(delay) if delay.drain_every > 0 && (step - 1).is_multiple_of(delay.drain_every) => step - 1,
        Some(_) => step.saturating_sub(2),
    }
}

fn reads_of_next(step: u64, delay: Delay) -> u64 {
    reads(step + 1, Some(delay))
}

/// The loss scale by DeepSpeed's dynamic rule. An overflow at the smallest scale is no error here, and leaves the scale
/// as it is.
struct Scaler {
    dynamic: bool,
    scale: f64,
    min: f64,
    window: i64,
    full: u32,
    consecutive: bool,
    hysteresis: u32,
    iteration: i64,
    last_overflow: i64,
}

impl Scaler {
    fn new(scale: Scale) -> Scaler {
        let (dynamic, options) = match scale {
            Scale::Fixed(initial) => (false, LossScalerOptions { initial, ..LossScalerOptions::default() }),
            Scale::Dynamic(options) => (true, options),
        };
        Scaler {
            dynamic,
            scale: options.initial,
            min: options.min,
            window: options.window as i64,
            full: options.hysteresis,
            consecutive: options.consecutive_hysteresis,
            hysteresis: options.hysteresis,
            iteration: 0,
            last_overflow: -1,
        }
    }

    fn update(&mut self, overflow: bool) {
        if self.dynamic && overflow {
            if self.hysteresis == 1 {
                self.scale = (self.scale / 2.0).max(self.min);
            } else {
                self.hysteresis -= 1;
            }
            self.last_overflow = self.iteration;
        } else if self.dynamic {
            if self.consecutive {
                self.hysteresis = self.full;
            }
            let stable = self.iteration - self.last_overflow - 1;
            if stable > 0 && stable % self.window == 0 {
                self.hysteresis = self.full;
                self.scale *= 2.0;
            }
        }
        self.iteration += 1;
    }
}

/// Encodes values as little-endian, rounded to nearest even.
fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

fn decode(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let two = |bytes: &[u8]| [bytes[0], bytes[1]];
    match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect(),
        Dtype::F16 => bytes.chunks_exact(2).map(|x| f16::from_le_bytes(two(x)).to_f32()).collect(),
        Dtype::Bf16 => bytes.chunks_exact(2).map(|x| bf16::from_le_bytes(two(x)).to_f32()).collect(),
    }
}
