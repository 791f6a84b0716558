//! The HTTP address agrees with the command line and with the training. A flood of HTTP connections harms no other
//! client.

use std::{
    fs,
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use bytes::Bytes;
use longshore_proto::{Dtype, Incarnation, JobName, JobSpec, Param, checksum::crc32};
use longshore_tests::{
    command::{done, longshore, longshored},
    conformance::{
        cluster::eventually,
        raw::{At, Raw, chunk, placement},
    },
    http::{self, FLAGS},
    server::{Longshored, ServerOptions},
    status::job_status,
    train::Train,
    undecided::undecided,
};
use longshore_wire::{Wire, v1};
use tempfile::TempDir;
use tokio::runtime::Runtime;

const STEPS: u64 = 9;

fn server() -> Longshored {
    ServerOptions::new().args(FLAGS).start()
}

#[test]
fn metrics_and_page_agree_with_status_and_with_the_trainer() {
    let servers = [server(), server()];
    let names: Vec<String> = servers.iter().map(|server| server.address().to_string()).collect();
    let http: Vec<String> = servers.iter().map(http::address).collect();
    // DNS rebinding: a foreign site lets its own name resolve to this server's address.
    let rebound = "GET /status.json HTTP/1.1\r\nHost: evil.example.com:7071\r\nConnection: close\r\n\r\n";
    let (code, _, said) = http::ask(&http[0], rebound);
    assert!(code == 421 && said.contains("--http-host"), "{code} {said}");
    let empty = http::metrics(&http[0]);
    assert!(empty.keys().all(|sample| !sample.contains("job=")), "{empty:?}");
    assert_eq!(empty["longshore_memory_budget_bytes"], (1u64 << 30) as f64);

    let run = Train::new(STEPS).servers(&names).args(["--world-size", "2"]).run();
    let status = job_status(&names);
    for (http, status) in http.iter().zip(&status.servers) {
        let samples = http::metrics(http);
        let of = |name: &str| samples[&format!("longshore_job_{name}{{job=\"default\"}}")];
        assert_eq!((of("version"), of("applied")), (status.version as f64, status.applied as f64));
        assert_eq!(of("pushed_bytes_total"), status.pushed_bytes as f64);
        assert_eq!(of("pulled_bytes_total"), status.pulled_bytes as f64);
        assert_eq!(of("memory_bytes"), status.memory_bytes as f64);
        assert_eq!(samples["longshore_memory_reserved_bytes"], status.memory_bytes as f64);
        let of_ranks = |name: &str| {
            let start = format!("longshore_job_rank_{name}_bytes_total{{job=\"default\",rank=");
            let of_rank = samples.iter().filter(|(sample, _)| sample.starts_with(&start));
            (of_rank.clone().count(), of_rank.map(|(_, bytes)| bytes).sum::<f64>())
        };
        // Each rank has one sample for each transport that it uses. Two ranks use one transport each.
        assert_eq!(of_ranks("pushed"), (2, of("pushed_bytes_total")));
        assert_eq!(of_ranks("pulled"), (2, of("pulled_bytes_total")));
        // Bytes of an element's update: 24 for master weight and two moments in and out, 4 for an fp32 sum, 2 for a
        // 16-bit image.
        assert_eq!(of("update_bytes_total"), of("elements") * 30.0 * STEPS as f64);
        assert_eq!(of("step_seconds_count"), (STEPS - 1) as f64);
        assert!(of("update_seconds_total") > 0.0 && of("sum_seconds_total") > 0.0);
        assert!(of("update_seconds_total") + of("sum_seconds_total") < 60.0);
        assert_eq!((of("trains"), of("waits")), (0.0, 0.0));
        let with = |name: &str, label: &str, value: &str| {
            samples[&format!("longshore_{name}{{job=\"default\",{label}=\"{value}\"}}")]
        };
        assert_eq!(with("job_steps_total", "outcome", "applied"), STEPS as f64);
        assert_eq!(with("job_ranks", "state", "left"), 2.0);
        assert_eq!(with("job_rank_last_step", "rank", "1"), STEPS as f64);
        let stage = |name: &str| with("job_stage_seconds_total", "stage", name);
        let stages = ["receive", "decide", "update", "pull"].map(stage);
        // The times of a stage add up to less than the run. Step times begin with the second step.
        assert!(stages.iter().all(|&seconds| seconds > 0.0 && seconds < 60.0), "{stages:?}");
        assert!(stage("update") >= of("update_seconds_total"), "{stages:?}");
        assert_eq!(of("queued_work"), 0.0);
        assert_eq!(samples["longshore_jobs{state=\"idle\"}"], 1.0);
        assert!(samples["longshore_memory_resident_bytes"] > 1e6);

        let last = run.said.steps().last().unwrap();
        assert_eq!((of("gradient_norm"), of("loss_scale")), (last.norm, last.loss_scale));
        assert_eq!(of("loss"), f64::from(last.loss));
        let exposed = run.said.steps().nth(STEPS as usize - 2).unwrap().exposed_ms;
        assert!((of("exposed_seconds") * 1e3 - exposed).abs() < 1e-3, "{exposed}");
        let page = http::json(http, "/status.json?after=4");
        let job = &page["jobs"][0];
        let norms: Vec<f64> =
            job["steps"].as_array().unwrap().iter().map(|s| s["norm"].as_f64().unwrap()).collect();
        let expected: Vec<f64> =
            run.said.steps().filter(|step| step.step > 4).map(|step| step.norm).collect();
        assert_eq!(norms, expected);
        assert_eq!((job["name"].as_str(), job["servers"].as_u64()), (Some("default"), Some(2)));
        assert_eq!(job["pushed_bytes"], status.pushed_bytes);
        // Each server's page lists all servers of a job.
        let members = job["members"].as_array().unwrap().iter();
        assert!(members.map(|member| member["address"].as_str().unwrap()).eq(names.iter()));
        let documented = include_str!("../../docs/observe.md");
        for key in keys(&page) {
            assert!(documented.contains(&format!("`{key}`")), "docs/observe.md does not list {key}");
        }
    }
    // Together the servers own the whole flat space.
    let elements = |http| http::metrics(http)["longshore_job_elements{job=\"default\"}"];
    let parameters = run.said.start().unwrap().parameters as f64;
    assert!(elements(&http[0]) + elements(&http[1]) >= parameters);
}

/// Returns the keys of all objects within a value.
fn keys(value: &serde_json::Value) -> Vec<String> {
    match value {
        serde_json::Value::Array(values) => values.iter().flat_map(keys).collect(),
        serde_json::Value::Object(entries) => {
            entries.iter().flat_map(|(key, value)| [vec![key.clone()], keys(value)].concat()).collect()
        }
        _ => Vec::new(),
    }
}

/// After a worker's death between gradient and decision, the servers lack nothing but the decision.
#[test]
fn a_decision_that_does_not_come_is_waited_for_by_name() {
    let server = server();
    let (name, http) = (server.address().to_string(), http::address(&server));
    let pipeline = undecided(&name, "undecided");
    let waits = "the decision on step 1 (its commit) from rank 0";
    // Before that, the server waits for chunks, and while it sums, for nothing.
    eventually("the server to wait for the decision", || {
        let page = http::json(&http, "/status.json");
        (page["jobs"][0]["waiting_for"] == waits).then_some(())
    });
    assert_eq!(http::metrics(&http)["longshore_job_waits{job=\"undecided\"}"], 1.0);
    let status = longshore(["status", "--no-hash", "--servers", &name]);
    assert!(status.stdout.contains(&format!("waits for {waits}")), "{status:?}");
    let top = longshore(["top", "--once", "--output", "json", "--servers", &name]);
    let top: serde_json::Value = serde_json::from_str(&top.stdout).unwrap();
    assert_eq!(top["jobs"][0]["waiting_for"], waits, "{top}");
    drop(pipeline);
}

#[test]
fn what_drives_are_asked_is_counted_by_drive() {
    let root = TempDir::new().unwrap();
    let dirs = ["a", "b"].map(|name| root.path().join(name));
    dirs.iter().for_each(|dir| fs::create_dir(dir).unwrap());
    let named = dirs.each_ref().map(|dir| dir.display().to_string());
    let server = ServerOptions::new()
        .args(["--state-dir", &named.join(","), "--resident", "2MiB", "--drive-endurance", "1TB"])
        .args(FLAGS)
        .start();
    let http = http::address(&server);
    let of_drive = |name: &str, drive: &str, operation: &str| {
        let labels = format!("{{drive=\"{drive}\",operation=\"{operation}\"}}");
        http::metrics(&http)[&format!("longshore_{name}{labels}")]
    };
    assert_eq!(of_drive("drive_bytes_total", &named[0], "write"), 0.0);
    Train::new(5).args(["--tier", "nvme"]).servers(&[server.address().to_string()]).run();
    let samples = http::metrics(&http);
    let of = |name: &str| samples[&format!("longshore_job_{name}{{job=\"default\"}}")];
    let sum =
        |operation| named.iter().map(|drive| of_drive("drive_bytes_total", drive, operation)).sum::<f64>();
    // The store counts joins as written too, but does not write them through the drives' queues.
    let (written, told) = (sum("write"), of("drives_written_bytes_total"));
    assert!(written > 0.9 * told && written <= told, "{written} of {told}");
    assert!(sum("read") > 0.0);
    for drive in &named {
        for operation in ["read", "write", "flush"] {
            assert!(of_drive("drive_request_seconds_count", drive, operation) > 0.0, "{drive} {operation}");
            assert_eq!(of_drive("drive_requests", drive, operation), 0.0);
        }
    }
    let taken = |place: &str| {
        samples[&format!("longshore_job_shards_taken_total{{job=\"default\",place=\"{place}\"}}")]
    };
    assert!(taken("resident") > 0.0 && taken("ahead") + taken("waited") > 0.0, "{samples:?}");
    assert_eq!(samples["longshore_drives_endurance_bytes"], 1e12);
}

#[test]
fn refused_calls_are_counted_by_kind_and_a_deleted_job_leaves_no_samples() {
    let server = server();
    let (name, http) = (server.address().to_string(), http::address(&server));
    let refused =
        |kind: &str| http::metrics(&http)[&format!("longshore_refused_calls_total{{kind=\"{kind}\"}}")];
    assert_eq!(refused("NOT_FOUND"), 0.0);
    // Before its job exists, the trainer asks for the job's servers, for the job, and for the server's clock.
    Train::new(2).servers(std::slice::from_ref(&name)).run();
    assert_eq!((refused("NOT_FOUND"), refused("INTERNAL")), (3.0, 0.0));
    // A damaged chunk is refused separately, on a call that goes on.
    let runtime = Runtime::new().unwrap();
    let raw = Raw::connect(runtime.handle().clone(), name.parse().unwrap());
    let incarnation = Incarnation(u64::MAX);
    raw.join("default", 0, incarnation.0).unwrap();
    let spec = JobSpec::from_wire(raw.describe("default").spec).unwrap();
    let right = chunk(&spec, &spec.validate().unwrap(), 0, At { step: 3, rank: 0, incarnation });
    assert_eq!(refused("CORRUPT"), 0.0);
    let torn = v1::PushRequest { crc32: !right.crc32, ..right.clone() };
    let results = raw.push_all(vec![torn, right]).unwrap();
    assert!(results[0].refusal.is_some() && results[1].refusal.is_none(), "{results:?}");
    assert_eq!(refused("CORRUPT"), 1.0);
    let of_a_job = || http::metrics(&http).keys().filter(|sample| sample.contains("job=\"default\"")).count();
    assert!(of_a_job() > 20);
    done(["delete", "--job", "default", "--servers", &name]);
    assert_eq!(of_a_job(), 0);
}

/// However many ranks push, only the first 64 have samples of their own.
#[test]
fn a_job_of_many_ranks_has_samples_of_the_first_64() {
    const RANKS: u32 = 100;
    // Admission counts the memory of 100 ranks' connections.
    let server = ServerOptions::new().args(FLAGS).memory("4GiB").start();
    let (name, http) = (server.address().to_string(), http::address(&server));
    let runtime = Runtime::new().unwrap();
    let raw = Raw::connect(runtime.handle().clone(), name.parse().unwrap());
    let job = "wide";
    let spec = JobSpec {
        world_size: RANKS,
        shard_elements: 65_536,
        ..JobSpec::new(
            JobName::parse("name", job).unwrap(),
            vec![Param { name: "p".into(), shape: vec![65_536], group: 0 }],
        )
    };
    let layout = spec.validate().unwrap();
    raw.open(spec.to_wire(), &placement(&[name], &layout), 0).unwrap();
    let alone = http::metrics(&http).keys().filter(|sample| !sample.contains(job)).count();
    raw.join(job, 0, 1).unwrap();
    let payload = Bytes::from(vec![0; 65_536 * size_of::<f32>()]);
    let crc32 = crc32(&payload);
    let zeros =
        v1::UploadRequest { job: job.into(), incarnation: 1, crc32, payload, ..v1::UploadRequest::default() };
    raw.call(raw.tensors.clone().upload(tokio_stream::iter([zeros]))).unwrap();
    eventually("the weights", || {
        raw.pull(job, 0, Dtype::Bf16, v1::Slice { shard: 0, offset: 0, elements: 64 }).ok()
    });
    for rank in 0..RANKS {
        let incarnation = raw.join(job, rank, 1).map(|_| Incarnation(1)).unwrap();
        assert_eq!(raw.push(chunk(&spec, &layout, 0, At { step: 1, rank, incarnation })), Ok(false));
    }
    let samples = http::metrics(&http);
    let of = |name: &str| {
        samples.keys().filter(|sample| sample.starts_with(&format!("longshore_{name}{{"))).count()
    };
    assert_eq!(samples["longshore_job_ranks{job=\"wide\",state=\"joined\"}"], f64::from(RANKS));
    // All ranks used TCP; rank 0 alone has pulled.
    let counts =
        [of("job_rank_last_step"), of("job_rank_pushed_bytes_total"), of("job_rank_pulled_bytes_total")];
    assert_eq!(counts, [64, 64, 1]);
    assert!(samples.contains_key("longshore_job_rank_last_step{job=\"wide\",rank=\"63\"}"));
    // docs/observe.md promises about 50 samples a job, without those of its ranks.
    let of_job = samples.len() - alone - counts.iter().sum::<usize>();
    assert!((30..70).contains(&of_job), "{of_job} samples of the job beside its ranks': {samples:?}");
    drop(raw);
    eventually("the end of the ranks' connection", || {
        let samples = http::metrics(&http);
        let gone = samples["longshore_job_ranks{job=\"wide\",state=\"not connected\"}"];
        (gone == f64::from(RANKS) && samples["longshore_job_trains{job=\"wide\"}"] == 0.0).then_some(())
    });
}

#[test]
fn a_job_that_cannot_be_served_is_named_and_leaves_the_server_ready() {
    let root = TempDir::new().unwrap();
    let dir = root.path().join("a");
    fs::create_dir(&dir).unwrap();
    let mut server = ServerOptions::new()
        .args(["--state-dir", &dir.display().to_string()])
        .args(FLAGS)
        .allow("not a job that can be opened")
        .allow("not recovered")
        .start();
    let http = http::address(&server);
    eventually("a server without jobs", || (http::get(&http, "/readyz").0 == 200).then_some(()));
    Train::new(2).args(["--tier", "nvme"]).servers(&[server.address().to_string()]).run();
    server.process.terminate();
    assert_eq!(server.process.code(), 0);
    // Damages the job's description.
    for entry in fs::read_dir(dir.join("default/server-0-of-1")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "json") {
            fs::write(&path, "{").unwrap();
        }
    }
    server.restart();
    let http = http::address(&server);
    let reason = eventually("the stored job to be tried", || {
        let (code, _, body) = http::get(&http, "/readyz");
        (code == 200).then_some(body)
    });
    assert!(reason.contains("job default: "), "{reason}");
    assert_eq!(http::get(&http, "/healthz").0, 200);
    assert_eq!(http::metrics(&http)["longshore_jobs{state=\"away\"}"], 1.0);
    let away = &http::json(&http, "/status.json")["away"][0];
    assert_eq!(away["name"], "default");
}

#[test]
fn it_is_read_only_and_lets_a_page_load_nothing_from_elsewhere() {
    let server = server();
    let http = http::address(&server);
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        let request =
            format!("{method} / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
        let (code, head, _) = http::ask(&http, &request);
        assert_eq!(code, 405, "{method}");
        assert!(head.contains("allow: get, head"), "{head}");
    }
    let (code, head, page) = http::get(&http, "/");
    assert_eq!(code, 200);
    assert!(head.contains("content-security-policy: default-src 'none'"), "{head}");
    assert!(!page.contains("http://") && !page.contains("https://"), "{page}");
    for file in ["/page.js", "/page.css"] {
        assert_eq!(http::get(&http, file).0, 200);
    }
    let (code, _, body) = http::get(&http, "/nothing");
    assert_eq!(code, 404);
    assert!(body.contains("/metrics"), "{body}");
    let refused = longshored(["--http", "0.0.0.0:0"]);
    assert_eq!(refused.code, 2);
    assert!(refused.stderr.contains("--http-open"), "{refused:?}");
}

#[test]
fn silent_and_endless_requests_end_and_hold_up_neither_training_nor_other_readers() {
    let server = server();
    let http = http::address(&server);
    let mut worker = Train::new(200).servers(&[server.address().to_string()]).start();
    worker.until_step(3);
    // Ten times as many connections as the server has places. Half are silent, and half begin headers without an end.
    let mut flood: Vec<TcpStream> = (0..320).map(|_| TcpStream::connect(&http).unwrap()).collect();
    for stream in flood.iter_mut().step_by(2) {
        // The server may have ended this connection already.
        let _ = stream.write_all(b"GET / HTTP/1.1\r\nX-Endless: ");
    }
    // Kubernetes gives a probe one second. The server ends connections that hold a place after ten seconds.
    for path in ["/healthz", "/readyz", "/metrics"] {
        let asked = Instant::now();
        assert_eq!(http::get(&http, path).0, 200);
        assert!(asked.elapsed() < Duration::from_secs(5), "{path} after {:?}", asked.elapsed());
    }
    worker.until_step(8);
    // The server ends silent connections: the first one to make room for others, the last one at its deadline.
    for mut stream in [&flood[0], &flood[319]] {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let ended = stream.read(&mut [0; 64]);
        assert!(!ended.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock), "{ended:?}");
    }
    let header = format!("GET / HTTP/1.1\r\nX-Large: {}\r\n\r\n", "x".repeat(100_000));
    let mut large = TcpStream::connect(&http).unwrap();
    let _ = large.write_all(header.as_bytes());
    large.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut answer = [0; 32];
    // Either an error or the connection's end, but never a page.
    let read = large.read(&mut answer).unwrap_or(0);
    assert!(!String::from_utf8_lossy(&answer[..read]).contains(" 200 "));
    worker.kill();
}
