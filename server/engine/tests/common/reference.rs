//! The expected result of a job: plain loops over f32, from the documented formulas alone. The engine shares no code
//! with these loops. A wrong engine passes only if the loops are wrong in the same way.

use std::{ops::Range, sync::OnceLock};

use longshore_proto::{
    Commit, Dtype, Hyper, JobSpec, MasterFormat, Rule, StateFormat, Version, checksum::state_hash,
};

use super::{BLOCK, decode, encode, low::Low};

/// Returns each parameter's range. A parameter starts at the next multiple of 64 elements. The first parameter of a
/// partition starts at the next block.
pub(crate) fn param_ranges(spec: &JobSpec) -> Vec<Range<usize>> {
    let mut start = 0usize;
    let place = |(index, param): (usize, &longshore_proto::Param)| {
        if spec.partitions.iter().any(|partition| partition.first as usize == index) {
            start = start.div_ceil(BLOCK) * BLOCK;
        }
        let size = param.shape.iter().product::<u64>() as usize;
        let range = start..start + size;
        start = (start + size).div_ceil(64) * 64;
        range
    };
    spec.params.iter().enumerate().map(place).collect()
}

/// Returns the flat range of each partition, with its contributors. A frozen partition has no contributors.
pub(crate) fn partitions(spec: &JobSpec) -> Vec<(Range<usize>, Vec<usize>)> {
    if spec.partitions.is_empty() {
        return vec![(0..flat_elements(spec), (0..spec.world_size as usize).collect())];
    }
    let ranges = param_ranges(spec);
    let starts: Vec<usize> = spec.partitions.iter().map(|one| ranges[one.first as usize].start).collect();
    let ends = starts[1..].iter().copied().chain([flat_elements(spec)]);
    let ranks = spec.partitions.iter().map(|one| one.ranks.iter().map(|rank| rank.0 as usize).collect());
    starts.iter().zip(ends).map(|(&start, end)| start..end).zip(ranks).collect()
}

/// Returns the flat ranges that no step changes.
pub(crate) fn frozen(spec: &JobSpec) -> Vec<Range<usize>> {
    partitions(spec).into_iter().filter(|(_, ranks)| ranks.is_empty()).map(|(range, _)| range).collect()
}

/// Returns the size of the flat space, in whole blocks.
pub(crate) fn flat_elements(spec: &JobSpec) -> usize {
    param_ranges(spec).last().unwrap().end.div_ceil(BLOCK) * BLOCK
}

/// A job's expected state after its newest commit.
#[derive(Clone)]
pub(crate) struct Reference {
    spec: JobSpec,
    /// Param group of each flat element. Padding belongs to the parameter before. `param` has the parameter in the same
    /// way.
    group: Vec<u32>,
    param: Vec<u32>,
    pub(crate) version: u64,
    pub(crate) applied: u64,
    pub(crate) master: Vec<f32>,
    pub(crate) first: Vec<f32>,
    pub(crate) second: Vec<f32>,
    /// The image's bytes, as workers pull them.
    pub(crate) image: Vec<u8>,
    /// State in fewer bits, which replaces `master`, `first` and `second` unless all of these are fp32.
    low: Option<Low>,
    /// The first weights in the image's format. Frozen ranges of every image equal them.
    given: Vec<u8>,
    /// Hash of this version, computed once a test has asked for the hash.
    hash: OnceLock<String>,
}

impl Reference {
    pub(crate) fn new(spec: &JobSpec, initial: &[f32]) -> Reference {
        let slot = |index: usize| vec![0.0; if index < spec.rule.state_slots() { initial.len() } else { 0 }];
        let mut group = vec![spec.params.last().unwrap().group; initial.len()];
        let mut of = vec![0; initial.len()];
        let starts = param_ranges(spec).into_iter().map(|range| range.start);
        for ((index, param), start) in (0..).zip(&spec.params).zip(starts) {
            group[start..].fill(param.group);
            of[start..].fill(index);
        }
        let fp32 = spec.formats.state == StateFormat::F32 && spec.formats.master == MasterFormat::F32;
        let low = (!fp32).then(|| Low::new(spec, initial));
        let given = encode(initial, spec.image_dtype);
        let mut master = initial.to_vec();
        for range in frozen(spec) {
            master[range.clone()].copy_from_slice(&decode(&given, spec.image_dtype)[range]);
        }
        let image = match &low {
            Some(low) => encode(&low.master(), spec.image_dtype),
            None => encode(initial, spec.image_dtype),
        };
        let mut reference = Reference {
            group,
            param: of,
            version: 0,
            applied: 0,
            master,
            first: slot(0),
            second: slot(1),
            image,
            low,
            spec: spec.clone(),
            given,
            hash: OnceLock::new(),
        };
        reference.image = reference.with_frozen(reference.image.clone());
        reference
    }

    /// Returns the image with its frozen ranges replaced by the first weights.
    fn with_frozen(&self, mut image: Vec<u8>) -> Vec<u8> {
        let size = self.spec.image_dtype.bytes() as usize;
        for range in frozen(&self.spec) {
            let bytes = range.start * size..range.end * size;
            image[bytes.clone()].copy_from_slice(&self.given[bytes]);
        }
        image
    }

    /// Returns each element's t, Adam's number of its update. None where the step changes nothing.
    fn times(&self, commit: &Commit) -> Vec<Option<u64>> {
        let mut times = times(commit, self.applied, &self.param);
        frozen(&self.spec).into_iter().for_each(|range| times[range].fill(None));
        times
    }

    /// Makes a step. `contributions` are gradients of the whole flat space as sent, ordered by micro-step, then by
    /// rank.
    pub(crate) fn step(&mut self, contributions: &[Vec<u8>], commit: &Commit) {
        let gradient = sum(&self.spec, contributions);
        self.hash.take();
        self.version += 1;
        assert_eq!(commit.step.0, self.version);
        if commit.skip {
            return;
        }
        self.applied += 1;
        if let Some(low) = &mut self.low {
            // `with_frozen` overwrites the frozen elements of this image.
            let t = times(commit, self.applied, &self.param);
            let image = low.step(&self.spec, &self.group, (self.applied, &t), &gradient, commit);
            self.image = self.with_frozen(image);
            return;
        }
        let multiplier = multipliers(&self.spec, commit);
        let mut emitted = vec![0.0; self.master.len()];
        let times = self.times(commit);
        let mut known: Option<(u32, u64, Terms)> = None;
        for (index, &raw) in gradient.iter().enumerate() {
            let (group, multiplier) = (self.group[index], multiplier[index]);
            let hyper = &commit.groups[group as usize];
            let old = self.master[index];
            let Some(t) = times[index] else {
                emitted[index] = quiet(old);
                continue;
            };
            if known.as_ref().is_none_or(|known| (known.0, known.1) != (group, t)) {
                let lr = commit.correction.look_ahead().get(group as usize).copied();
                known = Some((group, t, Terms::of(self.spec.rule, hyper, t, lr)));
            }
            let (_, _, terms) = known.as_ref().unwrap();
            let (mut a, mut b) = (at(&self.first, index), at(&self.second, index));
            let new = update(self.spec.rule, hyper, terms, raw * multiplier, old, &mut a, &mut b);
            self.master[index] = quiet(new);
            set(&mut self.first, index, a);
            set(&mut self.second, index, b);
            emitted[index] = quiet(match &terms.ahead {
                None => new,
                Some(of) => {
                    new - ahead(self.spec.rule, hyper, (terms, of), raw * multiplier, (old, new), (a, b))
                }
            });
        }
        self.image = self.with_frozen(encode(&emitted, self.spec.image_dtype));
    }

    /// Returns the master weights in fp32, whatever their format. Frozen weights are in `master`.
    pub(crate) fn weights(&self) -> Vec<f32> {
        let mut weights = self.low.as_ref().map_or_else(|| self.master.clone(), Low::master);
        for range in frozen(&self.spec) {
            weights[range.clone()].copy_from_slice(&self.master[range]);
        }
        weights
    }

    pub(crate) fn hash(&self) -> String {
        self.hash.get_or_init(|| self.compute_hash()).clone()
    }

    fn compute_hash(&self) -> String {
        let blocks = self.master.len() / BLOCK;
        let (frozen, size) = (frozen(&self.spec), BLOCK * self.spec.image_dtype.bytes() as usize);
        let hashes: Vec<[u8; 32]> = (0..blocks)
            .map(|block| {
                if frozen.iter().any(|range| range.contains(&(block * BLOCK))) {
                    return *blake3::hash(&self.given[block * size..(block + 1) * size]).as_bytes();
                }
                if let Some(low) = &self.low {
                    return low.hash(block);
                }
                let mut hasher = blake3::Hasher::new();
                for array in
                    [&self.master, &self.first, &self.second].into_iter().filter(|array| !array.is_empty())
                {
                    hasher.update(&encode(&array[block * BLOCK..][..BLOCK], Dtype::F32));
                }
                *hasher.finalize().as_bytes()
            })
            .collect();
        state_hash(Version(self.version), self.applied, &hashes)
    }
}

/// Returns each element's t, or None where the step leaves the parameter out.
fn times(commit: &Commit, applied: u64, params: &[u32]) -> Vec<Option<u64>> {
    let of = |param: &u32| match commit.left_out.iter().find(|left_out| left_out.param == *param) {
        Some(left_out) if left_out.now => None,
        Some(left_out) => Some(applied - left_out.steps),
        None => Some(applied),
    };
    params.iter().map(of).collect()
}

fn at(slot: &[f32], index: usize) -> f32 {
    slot.get(index).copied().unwrap_or(0.0)
}

fn set(slot: &mut [f32], index: usize, value: f32) {
    if let Some(element) = slot.get_mut(index) {
        *element = quiet(value);
    }
}

/// Replaces any NaN by 0x7FC0_0000, the only NaN that servers store.
fn quiet(x: f32) -> f32 {
    if x.is_nan() { f32::from_bits(0x7FC0_0000) } else { x }
}

/// Sums contributions in fp32. A lone contribution is only widened; several are added in order. A partition's sum is
/// over its contributors.
pub(crate) fn sum(spec: &JobSpec, contributions: &[Vec<u8>]) -> Vec<f32> {
    let decoded: Vec<Vec<f32>> =
        contributions.iter().map(|bytes| decode(bytes, spec.gradient_dtype)).collect();
    let mut total = Vec::with_capacity(flat_elements(spec));
    for (range, ranks) in partitions(spec) {
        let of_rank = |index: &usize| ranks.contains(&(index % spec.world_size as usize));
        let parts: Vec<&[f32]> =
            (0..decoded.len()).filter(of_rank).map(|index| &decoded[index][range.clone()]).collect();
        if parts.is_empty() {
            total.extend(range.map(|_| 0.0));
            continue;
        }
        let several = parts.len() > 1;
        let mut sum: Vec<f32> = parts[0].iter().map(|&x| if several { quiet(x) } else { x }).collect();
        for part in &parts[1..] {
            sum.iter_mut().zip(*part).for_each(|(sum, x)| *sum = quiet(*sum + x));
        }
        total.extend(sum);
    }
    total
}

/// Returns, for each flat element, the factor that turns the sum into the clipped mean.
pub(crate) fn multipliers(spec: &JobSpec, commit: &Commit) -> Vec<f32> {
    let mut found = vec![0.0; flat_elements(spec)];
    for (range, ranks) in partitions(spec) {
        if !ranks.is_empty() {
            let share = ranks.len() as f64 / f64::from(spec.world_size);
            found[range].fill((commit.clip_coefficient / (commit.gradient_scale * share)) as f32);
        }
    }
    found
}

/// Returns the sum of squares of each block. Element i belongs to lane i % 32. A lane adds 16 squares, of 512 elements,
/// in f32 with fused operations, and adds up these sums in f64. The lanes are then folded as a tree. Sums outside f32's
/// range are computed again in 16 lanes of f64.
pub(crate) fn block_squares(gradient: &[f32]) -> Vec<f64> {
    let block = |block: &[f32]| {
        let mut lanes = [0.0f64; 32];
        for rows in block.chunks(512) {
            for (lane, sum) in lanes.iter_mut().enumerate() {
                let squares = rows.iter().skip(lane).step_by(32).fold(0.0f32, |sum, x| x.mul_add(*x, sum));
                *sum += f64::from(squares);
            }
        }
        let sum = tree(&mut lanes);
        if sum.is_finite() && sum >= (-96f64).exp2() {
            return sum;
        }
        let mut lanes = [0.0f64; 16];
        for (index, &x) in block.iter().enumerate() {
            lanes[index % 16] += f64::from(x) * f64::from(x);
        }
        tree(&mut lanes)
    };
    gradient.chunks(BLOCK).map(block).collect()
}

fn tree(lanes: &mut [f64]) -> f64 {
    let half = lanes.len() / 2;
    if half == 0 {
        return lanes[0];
    }
    for lane in 0..half {
        lanes[lane] += lanes[lane + half];
    }
    tree(&mut lanes[..half])
}

/// Factors of a step that are the same for all elements with one param group and t.
struct Terms {
    /// Learning rate over Adam's first bias correction. For NAdam and Adagrad, the factor of the gradient.
    rate: f32,
    /// NAdam's factor of the first moment.
    mean_rate: f32,
    inverse_root: f32,
    is_first: bool,
    ahead: Option<AheadTerms>,
}

/// Factors of the look-ahead: one more step, with a learning rate of its own.
struct AheadTerms {
    mean: f32,
    gradient: f32,
    weight: f32,
}

impl Terms {
    fn of(rule: Rule, h: &Hyper, t: u64, look_ahead: Option<f64>) -> Terms {
        let power = |base: f64| base.powi(t as i32);
        let (mut rate, mut mean_rate) = (h.lr / (1.0 - power(h.beta1)), 0.0);
        if rule == Rule::NAdam {
            let mu = |i: u64| h.beta1 * (1.0 - 0.5 * 0.96f64.powf(i as f64 * h.momentum_decay));
            let product: f64 = (1..=t).map(mu).product();
            rate = h.lr * (1.0 - mu(t)) / (1.0 - product);
            mean_rate = h.lr * mu(t + 1) / (1.0 - product * mu(t + 1));
        } else if rule == Rule::Adagrad {
            rate = h.lr / (1.0 + (t - 1) as f64 * h.lr_decay);
        }
        let inverse_root = (1.0 / (1.0 - power(h.beta2)).sqrt()) as f32;
        let ahead = look_ahead.map(|lr| match rule {
            Rule::AdamW | Rule::Adam => AheadTerms {
                mean: (lr * h.beta1 / (1.0 - power(h.beta1))) as f32,
                gradient: (lr * 2.0 * (1.0 - h.beta1)) as f32,
                weight: if rule == Rule::Adam { 0.0 } else { (lr * h.beta1 * h.weight_decay) as f32 },
            },
            Rule::Sgd => {
                let known = if h.nesterov { h.momentum * h.momentum } else { h.momentum };
                let gradient = (lr * 2.0 * (1.0 - h.dampening)) as f32;
                AheadTerms { mean: (lr * known) as f32, gradient, weight: 0.0 }
            }
            Rule::Lion | Rule::Adagrad | Rule::NAdam => {
                unreachable!("a commit that looks ahead is refused for {rule}")
            }
        });
        Terms { rate: rate as f32, mean_rate: mean_rate as f32, inverse_root, is_first: t == 1, ahead }
    }
}

fn update(rule: Rule, h: &Hyper, terms: &Terms, g: f32, old: f32, first: &mut f32, second: &mut f32) -> f32 {
    let (lr, decay) = (h.lr as f32, h.weight_decay as f32);
    let shrink = (1.0 - h.lr * h.weight_decay) as f32;
    match rule {
        Rule::AdamW => adam(h, terms, g, old * shrink, first, second),
        Rule::Adam => adam(h, terms, g + decay * old, old, first, second),
        Rule::Sgd if h.momentum == 0.0 => old - lr * (g + decay * old),
        Rule::Sgd => {
            let (g, momentum) = (g + decay * old, h.momentum as f32);
            *first = if terms.is_first { g } else { *first * momentum + g * (1.0 - h.dampening) as f32 };
            old - lr * if h.nesterov { g + *first * momentum } else { *first }
        }
        Rule::NAdam => {
            let g = g + decay * old;
            let root = adam_root(h, terms, g, first, second);
            old - terms.rate * (g / root) - terms.mean_rate * (*first / root)
        }
        Rule::Lion => {
            let direction = *first * h.beta1 as f32 + g * (1.0 - h.beta1) as f32;
            let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
            *first = *first * h.beta2 as f32 + g * (1.0 - h.beta2) as f32;
            old * shrink - lr * sign
        }
        Rule::Adagrad => {
            let g = g + decay * old;
            *first += g * g;
            old - terms.rate * (g / (first.sqrt() + h.eps as f32))
        }
    }
}

fn adam(h: &Hyper, terms: &Terms, g: f32, master: f32, first: &mut f32, second: &mut f32) -> f32 {
    let root = adam_root(h, terms, g, first, second);
    master - terms.rate * (*first / root)
}

/// Updates Adam's moments. Returns the denominator of the step.
fn adam_root(h: &Hyper, terms: &Terms, g: f32, first: &mut f32, second: &mut f32) -> f32 {
    *first += (g - *first) * (1.0 - h.beta1) as f32;
    *second = *second * h.beta2 as f32 + ((1.0 - h.beta2) as f32 * g) * g;
    second.sqrt() * terms.inverse_root + h.eps as f32
}

/// Returns the distance by which a look-ahead image is ahead of the new weight.
fn ahead(
    rule: Rule,
    h: &Hyper,
    (terms, of): (&Terms, &AheadTerms),
    g: f32,
    (old, new): (f32, f32),
    (first, second): (f32, f32),
) -> f32 {
    let l2 = g + h.weight_decay as f32 * old;
    let adam = |g: f32| {
        (of.mean * first + of.gradient * g) / (second.sqrt() * terms.inverse_root + h.eps as f32)
            + of.weight * new
    };
    match rule {
        Rule::AdamW => adam(g),
        Rule::Adam => adam(l2),
        _ if h.momentum == 0.0 => 0.0,
        _ => of.mean * first + of.gradient * l2,
    }
}
