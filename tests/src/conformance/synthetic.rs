//! A model with a cheap gradient: a nonlinear function of the 16-bit weights and the batch. Its bits are equal on every
//! host.

use longshore_proto::Param;
use longshore_worker::{Pipeline, StepInputs};

use super::scenario::{Batch, Model};

/// A model of odd sizes over four blocks, with two param groups. `spikes` and `constants` cause overflows.
pub struct Synthetic {
    pub sizes: Vec<(&'static str, Vec<u64>, u32)>,
    pub spikes: Vec<Spike>,
    /// Parameters whose every gradient element has this value before the loss scale.
    pub constants: Vec<(usize, f32)>,
}

/// A wrong element of one gradient.
pub struct Spike {
    pub step: u64,
    pub rank: u32,
    pub param: usize,
    pub element: usize,
    pub value: f32,
}

impl Default for Synthetic {
    fn default() -> Synthetic {
        let sizes = vec![
            ("embedding", vec![331, 251], 0),
            ("norm", vec![7], 1),
            ("inner", vec![97, 13, 83], 0),
            ("scalar", vec![], 1),
            ("head", vec![64, 1031], 0),
        ];
        Synthetic { sizes, spikes: Vec::new(), constants: Vec::new() }
    }
}

/// A SplitMix64 generator of random numbers.
pub struct Noise(pub u64);

impl Noise {
    fn of(parts: [u64; 4]) -> Noise {
        let mut noise = Noise(0x5EED);
        for part in parts {
            noise = Noise(noise.draw() ^ part);
        }
        noise
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number in [-1, 1).
    pub fn unit(&mut self) -> f32 {
        ((self.draw() >> 40) as i32 - (1 << 23)) as f32 / (1 << 23) as f32
    }
}

impl Synthetic {
    fn elements(&self, param: usize) -> usize {
        self.sizes[param].1.iter().product::<u64>() as usize
    }

    /// Returns the gradient of one parameter and its part of the loss.
    fn part(&self, param: usize, weights: &[f32], batch: Batch, scale: f64) -> (f32, Vec<f32>) {
        let scale = scale as f32;
        let mut noise =
            Noise::of([batch.step, u64::from(batch.micro_step), u64::from(batch.rank), param as u64]);
        let mut loss = 0.0;
        let mut gradient: Vec<f32> = Vec::with_capacity(weights.len());
        for &w in weights {
            let r = noise.unit();
            loss += w * w - w * r;
            gradient.push((w * w * w - 0.5 * w + 0.25 * r) * scale);
        }
        if let Some((_, value)) = self.constants.iter().find(|(constant, _)| *constant == param) {
            gradient.fill(value * scale);
        }
        for spike in &self.spikes {
            if (spike.step, spike.rank, spike.param) == (batch.step, batch.rank, param) {
                gradient[spike.element] = spike.value;
            }
        }
        (loss / weights.len() as f32, gradient)
    }
}

impl Model for Synthetic {
    fn params(&self) -> Vec<Param> {
        let param = |(name, shape, group): &(&str, Vec<u64>, u32)| Param {
            name: name.to_string(),
            shape: shape.clone(),
            group: *group,
        };
        self.sizes.iter().map(param).collect()
    }

    fn initial(&self, param: usize) -> Vec<f32> {
        let mut noise = Noise::of([u64::MAX, 0, 0, param as u64]);
        (0..self.elements(param)).map(|_| noise.unit()).collect()
    }

    fn gradient(&self, weights: &[Vec<f32>], batch: Batch, scale: f64) -> (f32, Vec<Vec<f32>>) {
        let parts =
            weights.iter().enumerate().map(|(param, weights)| self.part(param, weights, batch, scale));
        let (losses, gradients): (Vec<f32>, Vec<Vec<f32>>) = parts.unzip();
        // Losses are summed from the last parameter to the first, in the order of backward.
        (losses.iter().rev().fold(0.0, |sum, loss| sum + loss), gradients)
    }

    fn micro_step(&self, pipeline: &mut Pipeline, step: StepInputs, batch: Batch) -> anyhow::Result<f32> {
        let mut assembler = pipeline.assembler(batch.micro_step)?;
        let mut loss = 0.0;
        for param in (0..self.sizes.len()).rev() {
            let range = pipeline.session().layout().param_range(param);
            let feed = pipeline.pull(step.reads, std::slice::from_ref(&range))?;
            let mut weights = vec![0.0; self.elements(param)];
            feed.read(range, &mut weights)?;
            let (part, gradient) = self.part(param, &weights, batch, step.loss_scale);
            loss += part;
            assembler.put(param, &gradient)?;
        }
        assembler.finish()?;
        Ok(loss)
    }
}
