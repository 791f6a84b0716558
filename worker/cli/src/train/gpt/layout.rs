//! Parameters of a model in registration order, and their division into stages.

use std::ops::Range;

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

use super::{Config, ConfigError, VOCABULARY};

/// The hyperparameters of a parameter: with or without weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    Decay,
    /// Biases, norms and positions. Decay would pull such parameters away from their neutral values.
    NoDecay,
}

/// A parameter. Names, shapes and orientation are those of Hugging Face's `GPT2LMHeadModel`, with a vocabulary of 256 and
/// an untied head. An exported model loads there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    pub name: String,
    pub shape: Vec<usize>,
    pub group: Group,
    start: Start,
}

impl Param {
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    Zero,
    One,
    Normal,
    /// The end of a residual branch, scaled by 1/sqrt(2 x layers). The branches' sum then starts with unit variance at
    /// any depth.
    Residual,
}

/// Parameters acquired, used and released as one: the embedding, a block, or the head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    pub name: String,
    /// The stage's parameters, as indices into [`Gpt::params`].
    pub params: Range<usize>,
}

/// The structure of a model. Its weights are elsewhere: see [`Weights`](super::Weights).
#[derive(Debug, Clone)]
pub struct Gpt {
    config: Config,
    params: Vec<Param>,
    stages: Vec<Stage>,
    pub(super) activation_budget_bytes: usize,
}

impl Gpt {
    pub fn new(config: Config) -> Result<Gpt, ConfigError> {
        config.validate()?;
        let mut layout = Layout::default();
        layout.embedding(&config);
        (0..config.layers).for_each(|layer| layout.block(layer, &config));
        layout.head(&config);
        let Layout { params, stages } = layout;
        Ok(Gpt { config, params, stages, activation_budget_bytes: 0 })
    }

    /// Lets the last blocks keep their activations for backward, within `bytes`, instead of computing them again. The
    /// gradients have the same bits either way. The default, 0, keeps only the activations of the last block.
    pub fn with_activation_budget(mut self, bytes: usize) -> Gpt {
        self.activation_budget_bytes = bytes;
        self
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// The stages in forward order: the embedding, the blocks, the head.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// Returns the initial values of one parameter, as GPT-2 draws them. The values depend on `seed` and the index
    /// alone. So any worker can make any parameter, in any order, without holding them all.
    pub fn init(&self, seed: u64, param: usize) -> Vec<f32> {
        let Param { start, .. } = &self.params[param];
        let elements = self.params[param].elements();
        let deviation = match start {
            Start::Zero => return vec![0.0; elements],
            Start::One => return vec![1.0; elements],
            Start::Normal => DEVIATION,
            Start::Residual => self.residual_deviation(),
        };
        normal(seed, param as u64, elements, deviation)
    }

    /// Returns the initial deviation of weights that add to the residual stream, as each layer does twice.
    fn residual_deviation(&self) -> f64 {
        DEVIATION / (2.0 * self.config.layers as f64).sqrt()
    }
}

const DEVIATION: f64 = 0.02;

/// Draws normal numbers by Box-Muller in f64, two values a draw.
fn normal(seed: u64, stream: u64, elements: usize, deviation: f64) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(stream);
    // Draws lie in (0, 1], without 0, so that their logarithm is finite.
    let mut uniform = || ((random.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64;
    let mut values = Vec::with_capacity(elements + 1);
    while values.len() < elements {
        let radius = deviation * (-2.0 * uniform().ln()).sqrt();
        let (sine, cosine) = (std::f64::consts::TAU * uniform()).sin_cos();
        values.push((radius * cosine) as f32);
        values.push((radius * sine) as f32);
    }
    values.truncate(elements);
    values
}

#[derive(Default)]
struct Layout {
    params: Vec<Param>,
    stages: Vec<Stage>,
}

impl Layout {
    fn embedding(&mut self, config: &Config) {
        let first = self.params.len();
        self.param("transformer.wte.weight", [VOCABULARY, config.width], Group::Decay, Start::Normal);
        self.param("transformer.wpe.weight", [config.context, config.width], Group::NoDecay, Start::Normal);
        self.stage("embedding", first);
    }

    fn block(&mut self, layer: usize, config: &Config) {
        let first = self.params.len();
        let (width, hidden) = (config.width, config.hidden());
        let name = |part: &str| format!("transformer.h.{layer}.{part}");
        self.norm(&name("ln_1"), width);
        self.linear(&name("attn.c_attn"), width, 3 * width, Start::Normal);
        self.linear(&name("attn.c_proj"), width, width, Start::Residual);
        self.norm(&name("ln_2"), width);
        self.linear(&name("mlp.c_fc"), width, hidden, Start::Normal);
        self.linear(&name("mlp.c_proj"), hidden, width, Start::Residual);
        self.stage(&format!("block.{layer}"), first);
    }

    fn head(&mut self, config: &Config) {
        let first = self.params.len();
        self.norm("transformer.ln_f", config.width);
        self.param("lm_head.weight", [VOCABULARY, config.width], Group::Decay, Start::Normal);
        self.stage("head", first);
    }

    fn norm(&mut self, name: &str, width: usize) {
        self.param(&format!("{name}.weight"), [width], Group::NoDecay, Start::One);
        self.param(&format!("{name}.bias"), [width], Group::NoDecay, Start::Zero);
    }

    /// A linear layer, stored input-major: `output = input x weight + bias`.
    fn linear(&mut self, name: &str, input: usize, output: usize, start: Start) {
        self.param(&format!("{name}.weight"), [input, output], Group::Decay, start);
        self.param(&format!("{name}.bias"), [output], Group::NoDecay, Start::Zero);
    }

    fn param<const RANK: usize>(&mut self, name: &str, shape: [usize; RANK], group: Group, start: Start) {
        self.params.push(Param { name: name.to_owned(), shape: shape.to_vec(), group, start });
    }

    fn stage(&mut self, name: &str, first: usize) {
        self.stages.push(Stage { name: name.to_owned(), params: first..self.params.len() });
    }
}
