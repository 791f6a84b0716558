//! The real model: a byte-level GPT of one layer. A run on servers and the reference loop both call the trainer's own
//! micro-step.

use std::{fmt::Write, sync::Arc};

use longshore_cli::train::{
    DeviceImages, ImageWeights, LayerGradients, Sink,
    gpt::{self, BoxError, Config, Gpt, Gradients, Group, Tensor, Weights},
    text::Corpus,
};
use longshore_proto::Param;
use longshore_worker::{Device, Pipeline, StepInputs};

use super::scenario::{Batch, Model};

pub struct Bytes {
    pub model: Gpt,
    corpus: Corpus,
    pub device: Arc<dyn Device>,
}

const SEED: u64 = 7;
const SEQUENCES: usize = 3;

impl Bytes {
    pub fn new(device: Arc<dyn Device>) -> Bytes {
        let config = Config { context: 16, width: 32, heads: 2, layers: 1 };
        let model = Gpt::new(config).expect("a model");
        let folder = text();
        let corpus = Corpus::load(folder.path()).expect("text");
        Bytes { model, corpus, device }
    }

    fn batch(&self, batch: Batch) -> longshore_cli::train::text::Batch {
        let Batch { step, micro_step, rank } = batch;
        self.corpus.batch(SEED, step, micro_step, rank, SEQUENCES, self.model.config().context)
    }
}

/// Returns a folder of training text.
pub fn text() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut text = String::new();
    for number in 0..400u32 {
        let square = number * number;
        writeln!(text, "The square of {number} is {square}, and its remainder by seven is {}.", square % 7)
            .expect("a string grows");
    }
    std::fs::write(folder.path().join("squares.txt"), text).expect("a file");
    folder
}

/// Weights from the reference loop's own image.
struct Image<'a> {
    model: &'a Gpt,
    weights: &'a [Vec<f32>],
}

impl Weights for Image<'_> {
    fn acquire(&mut self, stage: usize) -> Result<Vec<Tensor>, BoxError> {
        let params = self.model.stages()[stage].params.clone();
        let tensor = |param: usize| {
            Tensor::new(self.model.params()[param].shape.as_slice(), self.weights[param].clone())
        };
        Ok(params.map(tensor).collect())
    }

    fn release(&mut self, _stage: usize, _weights: Vec<Tensor>) {}
}

/// The gradients of a micro-step, collected for each parameter.
struct Collected<'a> {
    model: &'a Gpt,
    gradients: Vec<Vec<f32>>,
}

impl Gradients for Collected<'_> {
    fn emit(&mut self, stage: usize, gradients: Vec<Tensor>) -> Result<(), BoxError> {
        for (param, gradient) in self.model.stages()[stage].params.clone().zip(gradients) {
            self.gradients[param] = gradient.values().to_vec();
        }
        Ok(())
    }
}

impl Model for Bytes {
    fn params(&self) -> Vec<Param> {
        let param = |param: &gpt::Param| Param {
            name: param.name.clone(),
            shape: param.shape.iter().map(|&side| side as u64).collect(),
            group: u32::from(param.group == Group::NoDecay),
        };
        self.model.params().iter().map(param).collect()
    }

    fn initial(&self, param: usize) -> Vec<f32> {
        self.model.init(SEED, param)
    }

    fn gradient(&self, weights: &[Vec<f32>], batch: Batch, scale: f64) -> (f32, Vec<Vec<f32>>) {
        let mut image = Image { model: &self.model, weights };
        let mut collected = Collected { model: &self.model, gradients: vec![Vec::new(); weights.len()] };
        let batch = self.batch(batch);
        let loss = gpt::micro_step(&self.model, &mut image, &mut collected, &batch, scale as f32);
        (loss.expect("a loss"), collected.gradients)
    }

    fn micro_step(&self, pipeline: &mut Pipeline, step: StepInputs, batch: Batch) -> anyhow::Result<f32> {
        let mut gradients = LayerGradients::allocate(self.device.clone(), &self.model)?;
        let session = pipeline.session();
        let (layout, dtype) = (session.layout().clone(), session.spec().image_dtype);
        let whole = 0..layout.elements();
        let mut images = DeviceImages::allocate(self.device.clone(), (&self.model, &layout), dtype)?;
        let mut assembler = pipeline.assembler(batch.micro_step)?;
        let feed = pipeline.pull(step.reads, std::slice::from_ref(&whole))?;
        let mut sink = Sink::new(&self.model, &mut gradients, &mut assembler);
        let mut weights = ImageWeights::new((&self.model, &layout), feed, &mut images);
        let scale = step.loss_scale as f32;
        let loss = gpt::micro_step(&self.model, &mut weights, &mut sink, &self.batch(batch), scale)?;
        assembler.finish()?;
        Ok(loss)
    }
}
