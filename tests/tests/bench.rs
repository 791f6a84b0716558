//! The benches as commands: what they print, and the trace beside it.

use std::collections::BTreeMap;

use longshore_tests::command::longshore;
use serde_json::Value;

/// Three shards, the last one shorter than the others.
const PARAMS: &str = "9M";
const SHARDS: usize = 3;

fn step(more: &[&str]) -> Value {
    let fixed = ["bench", "step", "--params", PARAMS, "--rounds", "1", "--steps", "2", "--json"];
    let output = longshore([&fixed, more].concat());
    assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{output:?}");
    serde_json::from_str(&output.stdout).unwrap()
}

#[test]
fn steps_are_measured_over_every_transport() {
    for (transport, delay) in [("tcp", "0"), ("unix", "1"), ("memfd", "0"), ("memfd", "1")] {
        let line = step(&["--transport", transport, "--delay", delay, "--compute-ms", "1"]);
        assert_eq!(line["case"], format!("{transport}/memory/delay{delay}"));
        for key in ["step_ms", "push_alone_ms", "update_alone_ms", "cpu_over_cores_ms", "bound_ms"] {
            assert!(line[key].as_f64().is_some_and(|value| value > 0.0), "{key}: {line}");
        }
        let number = |key: &str| line[key].as_f64().unwrap();
        assert!(number("step_ms") >= 1.0, "a step is no shorter than its compute: {line}");
        assert!(number("exposed_ms") <= number("step_ms"), "{line}");
    }
}

#[test]
fn a_trace_has_every_stage_of_every_step() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    step(&["--transport", "memfd", "--trace", path.to_str().unwrap()]);
    let events: Vec<Value> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let mut open: BTreeMap<u64, Vec<(&str, usize)>> = BTreeMap::new();
    let mut closed: BTreeMap<&str, usize> = BTreeMap::new();
    for event in &events {
        let stack = open.entry(event["tid"].as_u64().unwrap()).or_default();
        match event["ph"].as_str().unwrap() {
            "B" => {
                // Sums of several shards are formed at once.
                let shards = event["args"]["shards"].as_str().map_or(1, |shards| shards.parse().unwrap());
                stack.push((event["name"].as_str().unwrap(), shards));
            }
            "E" => {
                let (name, shards) = stack.pop().expect("a stage that ends has begun");
                assert_eq!(event["name"], name, "stages of a thread are nested");
                *closed.entry(name).or_default() += shards;
            }
            _ => {}
        }
    }
    assert!(open.values().all(Vec::is_empty), "{open:?}");
    // One round warms up, and one counts.
    let steps = 4;
    for (stage, times) in
        [("begin", steps), ("finish", steps), ("sum", steps * SHARDS), ("update", steps * SHARDS)]
    {
        assert_eq!(closed.get(stage), Some(&times), "{stage}: {closed:?}");
    }
}

#[test]
fn a_trace_that_cannot_be_written_is_refused_at_once() {
    let output = longshore(["bench", "step", "--params", PARAMS, "--trace", "/nowhere/trace.json"]);
    assert_eq!(output.code, 1, "{output:?}");
    assert!(output.stderr.contains("--trace /nowhere/trace.json"), "{}", output.stderr);
}
