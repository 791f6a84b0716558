//! Generates text from a trained model, a byte at a time.

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

use super::{Batch, BoxError, Error, Gpt, Tensor, Weights, block, config::Shape, stages};

/// Continues `prompt` by `bytes` bytes. A temperature of 0 takes the likeliest byte; 1 draws as the model
/// predicts. All stages are acquired at once, since each byte needs them all.
///
/// The context is computed anew for each byte: a demo's sample is short, and a cache of keys and values would be
/// most of this file.
pub fn generate(
    model: &Gpt,
    weights: &mut dyn Weights,
    prompt: &[u8],
    bytes: usize,
    temperature: f64,
    seed: u64,
) -> Result<Vec<u8>, Error> {
    if !(temperature >= 0.0 && temperature.is_finite()) {
        return Err(Error::Temperature { value: temperature });
    }
    let mut held = Vec::with_capacity(model.stages().len());
    let result = acquire_all(model, weights, &mut held)
        .map(|()| continue_text(model, &held, prompt, bytes, temperature, seed));
    for (stage, tensors) in held.into_iter().enumerate() {
        weights.release(stage, tensors);
    }
    result
}

fn acquire_all(model: &Gpt, weights: &mut dyn Weights, held: &mut Vec<Vec<Tensor>>) -> Result<(), Error> {
    for (index, stage) in model.stages().iter().enumerate() {
        let tensors = weights.acquire(index);
        held.push(tensors.map_err(|source: BoxError| Error::Acquire { stage: stage.name.clone(), source })?);
    }
    Ok(())
}

fn continue_text(
    model: &Gpt,
    weights: &[Vec<Tensor>],
    prompt: &[u8],
    bytes: usize,
    temperature: f64,
    seed: u64,
) -> Vec<u8> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    // Byte 0 ends every file of a corpus, so it precedes a first byte too.
    let mut text = vec![0];
    text.extend_from_slice(prompt);
    for _ in 0..bytes {
        let seen = &text[text.len().saturating_sub(model.config().context)..];
        let uniform = (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        text.push(sample(logits(model, weights, seen).values(), temperature, uniform));
    }
    text.split_off(1 + prompt.len())
}

fn logits(model: &Gpt, weights: &[Vec<Tensor>], seen: &[u8]) -> Tensor {
    let inputs = seen.iter().map(|byte| *byte as u32).collect();
    let batch = Batch { inputs, targets: Vec::new(), sequences: 1, context: seen.len() };
    let shape = Shape::new(model.config(), &batch);
    let mut x = stages::embed(&weights[0], &batch, &shape);
    for block in &weights[1..=model.config().layers] {
        x = block::forward(&x, block, &shape).0;
    }
    let last = &x.values()[(seen.len() - 1) * shape.width..];
    stages::head(&Tensor::matrix(last.to_vec(), shape.width), &weights[weights.len() - 1]).1
}

fn sample(logits: &[f32], temperature: f64, uniform: f64) -> u8 {
    let likeliest =
        (0..logits.len()).fold(0, |best, byte| if logits[byte] > logits[best] { byte } else { best });
    if temperature == 0.0 {
        return likeliest as u8;
    }
    let weight = |byte: usize| ((logits[byte] as f64 - logits[likeliest] as f64) / temperature).exp();
    let mut left = uniform * (0..logits.len()).map(weight).sum::<f64>();
    for byte in 0..logits.len() {
        left -= weight(byte);
        if left < 0.0 {
            return byte as u8;
        }
    }
    likeliest as u8 // rounding left a crumb, or the logits are not numbers
}
