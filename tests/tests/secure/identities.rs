//! Calls that an identity may not make: the server refuses them with the reason, and nothing changes.

use std::{collections::BTreeSet, path::Path};

use http_body_util::BodyExt;
use longshore_tests::{
    conformance::cluster::eventually,
    server::{Longshored, ServerOptions},
    tls::{Folders, identity},
};
use longshore_wire::{
    Channel,
    v1::{
        DescribeRequest, DescribeResponse, Dtype, ExportRequest, WatchRequest, admin_client::AdminClient,
        training_client::TrainingClient,
    },
};
use prost::Message as _;
use serde_json::Value;
use tokio::runtime::Runtime;
use tonic::body::Body;
use tower_service::Service;

use super::{TOKEN, TOKEN_SHA256, ask, connect, train, version};

fn cluster() -> (Folders, Longshored) {
    let folders = Folders::new(
        &[
            identity("operator", &["operator"], &["*"], &[]),
            identity("worker", &["worker"], &["default", "absent"], &[]),
            identity("reader", &["reader"], &["default", "absent"], &[]),
            identity("tender", &["operator"], &["default", "absent"], &[]),
            identity("elsewhere", &["operator", "worker", "reader"], &["team-b-*"], &[TOKEN_SHA256]),
        ]
        .concat(),
    );
    let server = ServerOptions::new().tls(&folders.server()).start();
    (folders, server)
}

#[test]
fn roles_and_jobs_are_checked() {
    let (folders, server) = cluster();
    let [operator, worker, reader] = ["operator", "worker", "reader"].map(|name| folders.client(name));
    let elsewhere = folders.token(TOKEN);
    let end = train(4, &server, &worker).run().end;
    assert_eq!(end.version, 4);

    for (who, arguments, why) in [
        (&reader, &["delete", "--job", "default"][..], "reader, which is reader"),
        (&worker, &["delete", "--job", "default"], "worker, which is worker"),
        (&worker, &["drain"], "operator for Drain"),
        (
            &worker,
            &["scale", "--job", "default", "--to", server.address()],
            "operator for Scale with servers",
        ),
        (&reader, &["step-back", "--version", "3"], "worker or operator for StepBack"),
        (&elsewhere, &["delete", "--job", "default"], "elsewhere, with the jobs team-b-*"),
        (&elsewhere, &["drain"], "one with all jobs (*) for Drain"),
        (&elsewhere, &["export", "--job", "default", "--out", "/nonexistent/out"], "team-b-*"),
    ] {
        let said = ask(&server, who, arguments);
        assert!(said.code == 1 && said.stderr.contains(why), "{arguments:?}: {} {}", said.code, said.stderr);
    }
    let deadline = longshore_tests::process::DEADLINE;
    for (who, why) in
        [(&reader, "worker or operator for OpenJob"), (&elsewhere, "one that has the job \"default\"")]
    {
        let (stderr, _) = train(9, &server, who).start().fails(deadline);
        assert!(stderr.contains(why) && stderr.contains("FORBIDDEN"), "{stderr}");
    }
    assert_eq!(version(&server, &reader), 4, "what was refused has changed something");
    // An identity with other jobs does not see this one.
    assert!(ask(&server, &elsewhere, &["status"]).stdout.lines().all(|line| !line.contains("default")));
    let deleted = ask(&server, &operator, &["delete", "--job", "default"]);
    assert_eq!(deleted.code, 0, "{}", deleted.stderr);
    is_on_record(&server);
}

/// Checks the log's lines of operators' calls.
fn is_on_record(server: &Longshored) {
    let log = server.log();
    let lines = || log.iter().filter(|line| line["target"] == "audit").map(|line| &line["fields"]);
    let found = |who: &str, call: &str, outcome: &str| {
        lines().any(|line| line["who"] == who && line["call"] == call && line["outcome"] == outcome)
    };
    assert!(found("reader", "DeleteJob", "refused") && found("elsewhere", "Drain", "refused"), "{log:?}");
    assert!(found("operator", "DeleteJob", "answered"), "{log:?}");
    let deleted = lines().find(|line| line["who"] == "operator" && line["call"] == "DeleteJob").unwrap();
    assert_eq!(deleted["job"], "\"default\"");
}

/// Returns the calls of all services in the .proto files.
fn calls() -> BTreeSet<String> {
    let files = ["admin", "tensors", "training"].map(|name| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../proto/longshore/v1/{name}.proto"));
        std::fs::read_to_string(path).expect("a .proto file")
    });
    let mut calls = BTreeSet::new();
    for file in &files {
        let mut service = "";
        for line in file.lines().map(str::trim) {
            if let Some(rest) = line.strip_prefix("service ") {
                service = rest.trim_end_matches(" {");
            } else if let Some(rest) = line.strip_prefix("rpc ") {
                let call = rest.split('(').next().unwrap_or_default();
                calls.insert(format!("/longshore.v1.{service}/{call}"));
            }
        }
    }
    calls
}

const PERMISSION_DENIED: i32 = 7;
const UNAUTHENTICATED: i32 = 16;

/// Returns a message that names a job, always in the first field.
fn naming(job: &str) -> Vec<u8> {
    DescribeRequest { job: job.into(), ..Default::default() }.encode_to_vec()
}

/// Makes a call with this message. Returns its status, and the answer's text.
async fn call(channel: &mut Channel, path: &str, message: &[u8]) -> (i32, String) {
    let message = [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat();
    let body = http_body_util::Full::new(bytes::Bytes::from(message)).map_err(|never| match never {});
    let body = Body::new(body);
    let request =
        http::Request::post(path).header("content-type", "application/grpc").header("te", "trailers");
    std::future::poll_fn(|context| channel.poll_ready(context)).await.unwrap();
    let answer = channel.call(request.body(body).unwrap()).await.unwrap();
    let (head, body) = answer.into_parts();
    let body = body.collect().await.unwrap();
    let trailers = body.trailers().cloned().unwrap_or_default();
    let status = head.headers.get("grpc-status").or(trailers.get("grpc-status")).expect("a status");
    let status = status.to_str().unwrap().parse().unwrap();
    (status, String::from_utf8_lossy(&body.to_bytes()).into_owned())
}

#[test]
fn no_call_is_open_to_who_has_other_jobs_or_no_identity() {
    let (folders, server) = cluster();
    let runtime = Runtime::new().unwrap();
    runtime.block_on(async {
        let mut elsewhere = connect(&server, &folders.token(TOKEN)).await;
        let mut unknown = connect(&server, &folders.token("guessed")).await;
        assert!(calls().len() >= 24, "{:?}", calls());
        for path in calls() {
            let (status, said) = call(&mut elsewhere, &path, &[]).await;
            match path.rsplit('/').next() {
                // The answer lists the caller's jobs alone.
                Some("ListJobs") => assert_eq!(status, 0),
                // Each chunk has its own answer.
                Some("Push") => assert!(said.contains("FORBIDDEN"), "{path}: {status} {said}"),
                _ => assert_eq!(status, PERMISSION_DENIED, "{path}: {said}"),
            }
            assert_eq!(call(&mut unknown, &path, &[]).await.0, UNAUTHENTICATED, "{path}");
        }
    });
}

/// The calls of each role, as in docs/secure.md.
const LOOK: [&str; 8] =
    ["ListJobs", "Describe", "DescribeInParts", "ListCheckpoints", "Export", "Pull", "AwaitDurable", "Watch"];
const TEND: [&str; 12] = [
    "OpenJob",
    "Join",
    "Begin",
    "Retire",
    "Pause",
    "Checkpoint",
    "SealCheckpoint",
    "DiscardCheckpoint",
    "Restore",
    "StepBack",
    "Scale",
    "Fetch",
];
const TRAIN: [&str; 5] = ["Upload", "Push", "Stats", "Commit", "Leave"];
/// Calls of operators alone, except Drain, which needs an identity with all jobs.
const OPERATE: [&str; 2] = ["Resume", "DeleteJob"];

/// Returns the server's description of the job, with the hash of its state.
async fn state(channel: &Channel) -> DescribeResponse {
    let request = DescribeRequest { job: "default".into(), state_hash: true, ..Default::default() };
    let answer = AdminClient::new(channel.clone()).describe(request).await.expect("an answer").into_inner();
    assert!(!answer.hashes.is_empty(), "a job with state");
    DescribeResponse { idle_ms: 0, ..answer }
}

/// Returns the calls that a server audits, from its own list of calls.
fn audited() -> BTreeSet<String> {
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/src/trust/calls.rs");
    let list = std::fs::read_to_string(list).expect("the list of calls");
    let is_audited = |line: &&str| line.starts_with("act(\"") || line.contains("audited: true }");
    let path = |line: &str| line.split('"').nth(1).map(str::to_string);
    list.lines().map(str::trim).filter(is_audited).filter_map(path).collect()
}

/// Checks the caller's lines in the audit log: one for each operator's call and for each call refused for its
/// caller, and no others. `jobs` has each call, its job, and whether it was refused.
fn all_is_on_record(server: &Longshored, who: &str, jobs: &[(String, &str, bool)]) {
    let lines = || {
        let of_them = |line: &Value| line["target"] == "audit" && line["fields"]["who"] == who;
        server.log().into_iter().filter(of_them).map(|line| line["fields"].clone()).collect::<Vec<_>>()
    };
    let audited = audited();
    assert!(audited.len() >= 10, "{audited:?}");
    let expected: Vec<_> =
        jobs.iter().filter(|(path, _, denied)| *denied || audited.contains(path)).collect();
    eventually("the lines on record", || (lines().len() >= expected.len()).then_some(()));
    for (path, job, denied) in &expected {
        let call = path.rsplit('/').next().unwrap();
        let found: Vec<Value> = lines().into_iter().filter(|line| line["call"] == call).collect();
        let [line] = &found[..] else { panic!("{who}, {call}: {found:?}") };
        // A call without the role is refused before its message, which names the job, is read.
        let named = if *denied { String::new() } else { job.to_string() };
        assert_eq!(line["job"], format!("{named:?}"), "{who}, {call}: {line}");
        // The job is missing, so calls of the role are refused too. Only a call without the role is refused for its
        // identity.
        assert_eq!(line["outcome"], "refused", "{who}, {call}: {line}");
        let why = line["why"].as_str().unwrap_or_default();
        assert_eq!(why.starts_with(&format!("identity is {who}")), *denied, "{who}, {call}: {line}");
        assert!(why.len() > 20, "{who}, {call}: {line}");
    }
    assert_eq!(lines().len(), expected.len(), "{who}: {:?}", lines());
}

/// A reader may read weights, but no optimizer state. A reader's calls in a rank's name do not count as the rank's.
#[test]
fn a_reader_gets_no_optimizer_state_and_is_no_rank() {
    let (folders, server) = cluster();
    let [worker, reader] = ["worker", "reader"].map(|name| folders.client(name));
    train(4, &server, &worker).run();
    Runtime::new().unwrap().block_on(async {
        for (who, may) in [(&reader, false), (&worker, true)] {
            let channel = connect(&server, who).await;
            let mut admin = AdminClient::new(channel.clone());
            let export = |state| ExportRequest {
                job: "default".into(),
                dtype: Dtype::F32.into(),
                state,
                ..Default::default()
            };
            assert!(admin.export(export(false)).await.is_ok());
            let refused = admin.export(export(true)).await.err().map(|status| status.message().to_string());
            assert_eq!(refused.is_none(), may, "{refused:?}");
            assert!(refused.is_none_or(|why| why.contains("worker or operator for Export with state")));
            // The rank's process has left, so only this Watch can say that it is there.
            let incarnation = state(&channel).await.ranks[0].incarnation;
            let watch = WatchRequest { job: "default".into(), incarnation, ..Default::default() };
            let _watching = TrainingClient::new(channel.clone()).watch(watch).await.unwrap();
            assert_eq!(state(&channel).await.ranks[0].watches, may);
        }
    });
}

#[test]
fn each_role_may_do_what_it_is_for_and_nothing_else() {
    let (folders, server) = cluster();
    train(4, &server, &folders.client("worker")).run();
    Runtime::new().unwrap().block_on(async {
        for (who, may) in [
            ("reader", LOOK.to_vec()),
            ("worker", [&LOOK[..], &TEND, &TRAIN].concat()),
            ("tender", [&LOOK[..], &TEND, &OPERATE].concat()),
        ] {
            let mut channel = connect(&server, &folders.client(who)).await;
            let before = state(&channel).await;
            let mut made = Vec::new();
            for path in calls() {
                let name = path.rsplit('/').next().unwrap();
                // Permitted calls would take effect, so they name a job that does not exist.
                let job = if may.contains(&name) { "absent" } else { "default" };
                let (status, said) = call(&mut channel, &path, &naming(job)).await;
                let refused = status == PERMISSION_DENIED || said.contains("FORBIDDEN");
                assert_eq!(refused, !may.contains(&name), "{who}, {name}: {status} {said}");
                made.push((path.clone(), job, refused));
            }
            tokio::task::block_in_place(|| all_is_on_record(&server, who, &made));
            assert_eq!(state(&channel).await, before, "{who} has changed something");
        }
    });
}
