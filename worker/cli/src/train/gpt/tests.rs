//! Gradients against finite differences, and changes that must not change a bit.

use super::{
    Batch, BoxError, Config, Gpt, Gradients, Param, Tensor, Weights, micro_step, product::Real, step::Pass,
};

/// The head width is no multiple of a vector's width, so that row ends are covered too.
const CONFIG: Config = Config { context: 6, width: 18, heads: 2, layers: 2 };

/// Holds all weights, and counts loans.
struct Held<T> {
    stages: Vec<Vec<Tensor<T>>>,
    on_loan: usize,
}

impl<T: Clone> Weights<T> for Held<T> {
    fn acquire(&mut self, stage: usize) -> Result<Vec<Tensor<T>>, BoxError> {
        self.on_loan += 1;
        Ok(self.stages[stage].clone())
    }

    fn release(&mut self, _stage: usize, _weights: Vec<Tensor<T>>) {
        self.on_loan -= 1;
    }
}

struct Emitted<T>(Vec<(usize, Vec<Tensor<T>>)>);

impl<T> Default for Emitted<T> {
    fn default() -> Emitted<T> {
        Emitted(Vec::new())
    }
}

impl<T> Gradients<T> for Emitted<T> {
    fn emit(&mut self, stage: usize, gradients: Vec<Tensor<T>>) -> Result<(), BoxError> {
        self.0.push((stage, gradients));
        Ok(())
    }
}

impl Emitted<f32> {
    fn bits(&self) -> Vec<u32> {
        let tensors = self.0.iter().flat_map(|(_, tensors)| tensors);
        tensors.flat_map(Tensor::values).map(|value| value.to_bits()).collect()
    }
}

fn stage_params(model: &Gpt, stage: usize) -> &[Param] {
    &model.params()[model.stages()[stage].params.clone()]
}

fn model() -> Gpt {
    Gpt::new(CONFIG).unwrap()
}

/// Initial weights, with zeros and ones shaken and the rest enlarged, so that every path shows.
fn held<T: Real>(model: &Gpt) -> Held<T> {
    let tensor = |index: usize| {
        let values = model.init(3, index);
        let shaken = |(i, x): (usize, &f32)| T::from_f64((*x * 8.0) as f64 + (i as f64).sin() / 7.0);
        let values = values.iter().enumerate().map(shaken).collect();
        Tensor::new(model.params()[index].shape.as_slice(), values)
    };
    let stages = model.stages().iter().map(|stage| stage.params.clone().map(tensor).collect()).collect();
    Held { stages, on_loan: 0 }
}

fn batch(context: usize) -> Batch {
    let byte = |index: usize| (index * index * 31 + 7) as u32 % 256;
    let rows = 3 * context;
    Batch {
        inputs: (0..rows).map(byte).collect(),
        targets: (1..=rows).map(byte).collect(),
        sequences: 3,
        context,
    }
}

fn loss(model: &Gpt, weights: &mut Held<f64>, batch: &Batch) -> f64 {
    Pass::<f64>::new(model, weights, batch).loss().unwrap()
}

fn nudged(tensor: &Tensor<f64>, element: usize, by: f64) -> Tensor<f64> {
    let mut values = tensor.values().to_vec();
    values[element] += by;
    tensor.like(values)
}

#[test]
fn every_parameter_has_the_gradient_of_finite_differences() {
    const LOSS_SCALE: f32 = 4.0;
    const STEP: f64 = 1e-5;
    let (model, batch) = (model(), batch(CONFIG.context));
    let mut weights = held(&model);
    let mut emitted = Emitted::default();
    Pass::<f64>::new(&model, &mut weights, &batch).micro_step(&mut emitted, LOSS_SCALE).unwrap();
    assert_eq!(emitted.0.len(), model.stages().len());
    for (stage, gradients) in emitted.0 {
        let params = stage_params(&model, stage);
        assert_eq!(gradients.len(), params.len());
        for (index, (param, gradient)) in params.iter().zip(&gradients).enumerate() {
            assert_eq!(gradient.shape(), param.shape, "{}", param.name);
            let gradient = gradient.values();
            let largest =
                (0..gradient.len()).max_by(|a, b| gradient[*a].abs().total_cmp(&gradient[*b].abs())).unwrap();
            // Biases of the keys shift all scores of a query alike, which softmax ignores: their true gradient is
            // 0.
            assert!(gradient[largest].abs() > 1e-4, "{} has no gradient", param.name);
            for element in [largest, 0, gradient.len() / 2, gradient.len() - 1] {
                let original = weights.stages[stage][index].clone();
                let mut difference = |by| {
                    weights.stages[stage][index] = nudged(&original, element, by);
                    loss(&model, &mut weights, &batch)
                };
                let expected = LOSS_SCALE as f64 * (difference(STEP) - difference(-STEP)) / (2.0 * STEP);
                weights.stages[stage][index] = original;
                let error = (gradient[element] - expected).abs();
                let limit = 1e-6 + 1e-5 * expected.abs();
                assert!(error < limit, "{}[{element}]: {} is not {expected}", param.name, gradient[element]);
            }
        }
    }
}

#[test]
fn a_micro_step_has_the_same_bits_whatever_recomputes_or_shares_it() {
    // Several chunks of rows, of which the last is incomplete.
    let config = Config { context: 50, ..CONFIG };
    let (model, batch) = (Gpt::new(config).unwrap(), batch(config.context));
    let run = |model: &Gpt| {
        let (mut weights, mut emitted) = (held(model), Emitted::default());
        let loss = micro_step(model, &mut weights, &mut emitted, &batch, 1024.0).unwrap();
        assert_eq!(weights.on_loan, 0);
        (loss.to_bits(), emitted.bits())
    };
    let first = run(&model);
    assert_eq!(first, run(&model));
    assert_eq!(first, run(&model.clone().with_activation_budget(usize::MAX)));
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(first, pool.install(|| run(&model)));
    }
}

#[test]
fn single_precision_agrees_with_double() {
    let (model, batch) = (model(), batch(CONFIG.context));
    let (mut single, mut double) = (Emitted::default(), Emitted::default());
    let loss = micro_step(&model, &mut held::<f32>(&model), &mut single, &batch, 1.0).unwrap();
    let mut weights = held(&model);
    let expected = Pass::<f64>::new(&model, &mut weights, &batch).micro_step(&mut double, 1.0).unwrap();
    assert!((loss as f64 - expected).abs() < 1e-5, "{loss} is not {expected}");
    for ((stage, single), (_, double)) in single.0.iter().zip(&double.0) {
        for (param, (single, double)) in stage_params(&model, *stage).iter().zip(single.iter().zip(double)) {
            let (single, double) = (single.values().iter(), double.values().iter());
            let limit = 1e-4 * double.clone().fold(0.0, |largest: f64, x| largest.max(x.abs()));
            let worst = single.zip(double).fold(0.0, |worst: f64, (x, y)| worst.max((*x as f64 - y).abs()));
            assert!(worst < limit, "{}: off by {worst}", param.name);
        }
    }
}

#[test]
fn exponentials_are_near_libm_and_keep_what_is_not_finite() {
    for index in -870..880 {
        let x = index as f32 / 10.0;
        let (got, expected) = (Real::exp(x) as f64, (x as f64).exp());
        assert!((got / expected - 1.0).abs() < 3e-7, "exp({x}) is {got}, not {expected}");
    }
    assert!(Real::exp(f32::NAN).is_nan());
    assert!(Real::exp(f32::NEG_INFINITY) < 1e-37);
}
