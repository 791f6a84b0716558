//! The kernels on every instruction set, and a whole job, against results recorded from torch.optim.

use std::path::Path;

use longshore_engine::kernels::{Gradient, Hyper, ImageMut, Isa, Rule, Scalars, State, update};
use longshore_proto::Dtype;
use serde_json::Value;

use crate::common::{
    self, cluster::Cluster, cluster::compute, commit, encode, reference::param_ranges, spec,
};

/// The largest relative difference. Parameters below the floor count as large as the floor.
const TOLERANCE: f64 = 1e-6;
const FLOOR: f64 = 0.01;

struct Fixture {
    cases: Vec<Value>,
    initial: Vec<f32>,
    gradients: Vec<Vec<f32>>,
}

fn fixture() -> Fixture {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/adamw_torch.json");
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let header = &file["header"];
    let (elements, steps) = (header["elements"].as_u64().unwrap(), header["steps"].as_u64().unwrap());
    let mut x = header["generator"]["seed"].as_u64().unwrap() as u32;
    let mut draw = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        ((x >> 8) as i32 - (1 << 23)) as f32
    };
    let initial: Vec<f32> = (0..elements).map(|_| draw() * 2f32.powi(-23)).collect();
    let mut gradient = |i: u64| {
        let value = draw() * 2f32.powi(-26 - 3 * (i % 8) as i32);
        if i % 64 == 63 { 0.0 } else { value }
    };
    let gradients: Vec<Vec<f32>> = (0..steps).map(|_| (0..elements).map(&mut gradient).collect()).collect();
    let generator = &header["generator"];
    assert_eq!(floats(&generator["first_initial_values"]), initial[..4]);
    assert_eq!(floats(&generator["first_gradients_of_step_1"]), gradients[0][..4]);
    assert_eq!(
        floats(&generator["last_gradients_of_last_step"]),
        gradients.last().unwrap()[elements as usize - 4..]
    );
    Fixture { cases: file["cases"].as_array().unwrap().clone(), initial, gradients }
}

fn floats(digits: &Value) -> Vec<f32> {
    let digits = digits.as_str().unwrap();
    let bits = |at: usize| u32::from_str_radix(&digits[at..at + 8], 16).unwrap();
    (0..digits.len()).step_by(8).map(|at| f32::from_bits(bits(at))).collect()
}

/// Returns the hyperparameters of a group at a step, from 0. `Hyper` is the kernels' type or the protocol's.
macro_rules! hyper {
    ($hyper:ident, $case:expr, $group:expr, $step:expr) => {{
        let setting = |name: &str| $case["settings"][name].as_f64().unwrap_or(0.0);
        $hyper {
            lr: $group["lr"][$step].as_f64().unwrap(),
            beta1: setting("beta1"),
            beta2: setting("beta2"),
            eps: setting("eps"),
            weight_decay: $group["weight_decay"].as_f64().unwrap(),
            momentum: setting("momentum"),
            dampening: setting("dampening"),
            nesterov: $case["settings"]["nesterov"].as_bool().unwrap_or(false),
            lr_decay: 0.0,
            momentum_decay: setting("momentum_decay"),
        }
    }};
}

fn check_parameters(case: &Value, step: usize, found: &[f32], by: &str) -> bool {
    let Some(recorded) = case["parameters"].get((step + 1).to_string()) else { return false };
    for (index, (&ours, theirs)) in found.iter().zip(floats(recorded)).enumerate() {
        let gap = (f64::from(ours) - f64::from(theirs)).abs();
        let limit = TOLERANCE * f64::from(theirs.abs()).max(FLOOR);
        assert!(
            gap <= limit,
            "{} by {by}, step {}, element {index}: {ours} {theirs}",
            case["name"],
            step + 1
        );
    }
    true
}

/// Compares the moments after the last step. The mean of signed values may cancel, so the tolerance takes the
/// values' magnitude.
fn check_state(fixture: &Fixture, case: &Value, first: &[f32], second: &[f32], by: &str) {
    let recorded = case["state_after_last_step"].as_object().unwrap();
    for (name, digits) in recorded {
        let found = if name == "exp_avg_sq" { second } else { first };
        let theirs = floats(digits);
        assert_eq!(found.len(), theirs.len());
        for (index, (&ours, &theirs)) in found.iter().zip(&theirs).enumerate() {
            let beside = match name.as_str() {
                "exp_avg" => floats(&recorded["exp_avg_sq"])[index].sqrt(),
                "momentum_buffer" => fixture.gradients.iter().fold(0.0, |most, g| g[index].abs().max(most)),
                _ => 0.0,
            };
            let gap = (f64::from(ours) - f64::from(theirs)).abs();
            let limit = TOLERANCE * f64::from(theirs.abs().max(beside));
            assert!(gap <= limit, "{} by {by}, {name}[{index}]: {ours} {theirs}", case["name"]);
        }
    }
}

fn replay(fixture: &Fixture, case: &Value, isa: Isa) {
    let rule = match case["rule"].as_str().unwrap() {
        "adamw" => Rule::AdamW,
        "adam" => Rule::Adam,
        "sgd" => Rule::Sgd,
        "adagrad" => Rule::Adagrad,
        "nadam" => Rule::NAdam,
        other => panic!("no rule {other}"),
    };
    let count = fixture.initial.len();
    let (mut master, mut first, mut image) = (fixture.initial.clone(), vec![0.0; count], vec![0.0; count]);
    let mut second = vec![0.0; if rule.state_slots() > 1 { count } else { 0 }];
    let mut checked = 0;
    for (step, gradient) in fixture.gradients.iter().enumerate() {
        for group in case["groups"].as_array().unwrap() {
            let range = group["start"].as_u64().unwrap() as usize..group["end"].as_u64().unwrap() as usize;
            let mut state = State { master: &mut master, first: &mut first, second: &mut second };
            let scalars = Scalars::new(rule, &hyper!(Hyper, case, group, step), step as u64 + 1, 1.0);
            let gradient = Gradient::f32(&gradient[range.clone()]);
            update(isa, &scalars, gradient, state.slice(range.clone()), ImageMut::F32(&mut image[range]));
        }
        assert_eq!(image, master);
        checked += usize::from(check_parameters(case, step, &master, &isa.to_string()));
    }
    assert_eq!(checked, case["parameters"].as_object().unwrap().len());
    check_state(fixture, case, &first, &second, &isa.to_string());
}

#[test]
fn kernels_follow_torch() {
    let fixture = fixture();
    assert_eq!(fixture.cases.len(), 8);
    for case in &fixture.cases {
        for isa in Isa::available() {
            replay(&fixture, case, isa);
        }
    }
}

/// Two param groups that meet inside a block, a learning rate that changes each step, and fp32 gradients.
#[test]
fn a_job_follows_torch() {
    use longshore_proto::Hyper;
    let fixture = fixture();
    for case in fixture.cases.iter().filter(|case| case["rule"] == "adamw") {
        for isa in Isa::available() {
            let mut spec = spec(&[323, 189], &[0, 1]);
            (spec.gradient_dtype, spec.image_dtype) = (Dtype::F32, Dtype::F32);
            let ranges = param_ranges(&spec);
            let spread = |values: &[f32]| {
                let mut flat = vec![0.0; common::BLOCK];
                flat[ranges[0].clone()].copy_from_slice(&values[..323]);
                flat[ranges[1].clone()].copy_from_slice(&values[323..]);
                flat
            };
            let gather = |flat: &[f32]| [&flat[ranges[0].clone()], &flat[ranges[1].clone()]].concat();
            let mut cluster = Cluster::open(&spec, 1, &compute(1, isa));
            cluster.join(0);
            cluster.upload(&spread(&fixture.initial));
            for (step, gradient) in fixture.gradients.iter().enumerate() {
                let groups = case["groups"].as_array().unwrap();
                let mut commit = commit(&spec, step as u64 + 1);
                commit.groups = groups.iter().map(|group| hyper!(Hyper, case, group, step)).collect();
                cluster.step(&[encode(&spread(gradient), Dtype::F32)], &commit);
                check_parameters(case, step, &gather(&cluster.state()[0]), "a job");
            }
            let [_, first, second] = cluster.state().map(|array| gather(&array));
            check_state(&fixture, case, &first, &second, "a job");
        }
    }
}
