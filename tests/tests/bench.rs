//! The benches as commands: their output, and the trace beside it.

use std::collections::BTreeMap;

use longshore_tests::{command::longshore, server::ServerOptions};
use serde_json::Value;

/// Nine million parameters: three shards, the last one shorter.
const PARAMS: &str = "9M";
const SHARDS: usize = 3;

fn step(more: &[&str]) -> Value {
    let fixed = ["bench", "step", "--params", PARAMS, "--rounds", "1", "--steps", "2", "--json"];
    let output = longshore([&fixed, more].concat());
    // On a busy host the filling of the job may last until the message of a slow wait.
    let mut said = output.stderr.lines().filter(|line| !line.contains("still waiting for"));
    assert_eq!((output.code, said.next()), (0, None), "{output:?}");
    serde_json::from_str(&output.stdout).unwrap()
}

#[test]
fn steps_are_measured_over_every_transport() {
    for (transport, delay) in [("tcp", "0"), ("unix", "1"), ("memfd", "0")] {
        let line = step(&["--transport", transport, "--delay", delay, "--compute-ms", "1"]);
        assert_eq!(line["case"], format!("{transport}/memory/delay{delay}"));
        for key in
            ["step_ms", "push_alone_ms", "update_alone_ms", "cpu_over_cores_ms", "bound_ms", "predicted_ms"]
        {
            assert!(line[key].as_f64().is_some_and(|value| value > 0.0), "{key}: {line}");
        }
        let number = |key: &str| line[key].as_f64().unwrap();
        assert!(number("step_ms") >= 1.0, "a step is no shorter than its compute: {line}");
        assert!(number("exposed_ms") <= number("step_ms"), "{line}");
    }
}

#[test]
fn steps_of_servers_that_run_elsewhere_are_predicted_and_leave_nothing_there() {
    let servers = [(); 2].map(|()| ServerOptions::new().start());
    let addresses = servers.each_ref().map(|server| server.address()).join(",");
    for delay in ["0", "1"] {
        // The links are the bottleneck: 18 MB at 80 MB/s take 0.23 s each way.
        let line = step(&["--servers", &addresses, "--link", "80M", "--compute-ms", "50", "--delay", delay]);
        assert_eq!(line["servers"], 2, "{line}");
        assert!(line["reserved_bytes"].as_u64().is_some_and(|bytes| bytes > 9_000_000 * 18 / 2), "{line}");
        let over = line["step_over_predicted"].as_f64().unwrap();
        // Closer agreement needs a quiet machine: docs/plan.md.
        assert!((0.5..3.0).contains(&over), "{line}");
        let binding = line["predicted_binding"].as_str().unwrap();
        assert!(["push", "pull"].contains(&binding), "{line}");
        let jobs = longshore(["status", "--servers", &addresses]);
        assert!(!jobs.stdout.contains("bench-step"), "{jobs:?}");
    }
}

#[test]
fn a_probe_prints_what_a_plan_takes() {
    let folder = tempfile::tempdir().unwrap();
    let server = ServerOptions::new().start();
    let probe = longshore(["plan", "--probe", "--probe-servers", server.address()]);
    assert_eq!((probe.code, probe.stderr.as_str()), (0, ""), "{probe:?}");
    let path = folder.path().join("node.toml");
    std::fs::write(&path, &probe.stdout).unwrap();
    let plan =
        ["plan", "--params", "100M", "--json", "--gpu-tflops", "100", "--hardware", path.to_str().unwrap()];
    let plan = longshore(plan);
    assert_eq!((plan.code, plan.stderr.as_str()), (0, ""), "{plan:?} {probe:?}");
    let plan: Value = serde_json::from_str(&plan.stdout).unwrap();
    assert!(plan["gpus"]["stages"][0]["step_s"].as_f64().is_some_and(|seconds| seconds > 0.0), "{plan}");
    let jobs = longshore(["status", "--servers", server.address()]);
    assert!(!jobs.stdout.contains("bench-wire"), "{jobs:?}");
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
                // An event may form the sums of several shards.
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
    // The warm-up round and the measured round together make this many steps.
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
