//! The audit record of calls, whatever their outcome, and the counters of refused calls.

use std::{path::Path, time::Duration};

use longshore_proto::FaultKind;
use longshore_tests::{
    conformance::cluster::eventually,
    http::{self, FLAGS},
    peer::{END_HEADERS, HEADERS, Peer, call, frame},
    server::{Longshored, ServerOptions},
    tls::{Folders, identity},
};
use longshore_wire::{
    fault_from_wire,
    v1::{self, admin_client::AdminClient, tensors_client::TensorsClient, training_client::TrainingClient},
};
use serde_json::Value;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::{Code, Request};

use super::{TOKEN, ask, connect, train};

/// A version that no test here reaches.
const NEVER: u64 = 99;

/// Returns the record's lines about a call.
fn lines(server: &Longshored, call: &str) -> Vec<Value> {
    let log = server.log().into_iter().filter(|line| line["target"] == "audit");
    log.map(|line| line["fields"].clone()).filter(|fields| fields["call"] == call).collect()
}

/// Waits for the first line about a call.
fn line(server: &Longshored, call: &str) -> Value {
    eventually("a line on the record", || lines(server, call).into_iter().next())
}

/// Returns the number of calls of this kind that the server has refused.
fn refused(server: &Longshored, kind: FaultKind) -> f64 {
    let sample = format!("longshore_refused_calls_total{{kind=\"{}\"}}", kind.name());
    http::metrics(&http::address(server))[&sample]
}

fn everything() -> String {
    let all = ["operator", "worker", "reader"];
    [identity("operator", &all, &["*"], &[]), identity("worker", &["worker"], &["default"], &[])].concat()
}

/// Returns a checkpoint request that waits for a step which is never made.
fn never(name: &str) -> Request<v1::CheckpointRequest> {
    let (job, name) = ("default".into(), name.into());
    Request::new(v1::CheckpointRequest { job, name, version: NEVER, check: false })
}

fn cluster(folders: &Folders, checkpoints: &Path) -> Longshored {
    let server = ServerOptions::new().tls(&folders.server()).checkpoint_dir(checkpoints).args(FLAGS).start();
    train(4, &server, &folders.client("worker")).run();
    server
}

#[test]
fn a_call_that_its_caller_gives_up_is_on_record() {
    let (folders, checkpoints) = (Folders::new(&everything()), TempDir::new().unwrap());
    let server = cluster(&folders, checkpoints.path());
    let mut request = never("given-up");
    request.set_timeout(Duration::from_millis(500));
    Runtime::new().unwrap().block_on(async {
        let mut admin = AdminClient::new(connect(&server, &folders.client("operator")).await);
        admin.checkpoint(request).await.expect_err("nobody makes that step");
    });
    let line = line(&server, "Checkpoint");
    assert_eq!((&line["who"], &line["outcome"]), (&"operator".into(), &"unknown".into()), "{line}");
    assert_eq!(
        (&line["job"], &line["why"]),
        (&"\"default\"".into(), &"the call or its connection ended before the answer".into())
    );
}

/// A call cancelled before its message came has changed nothing, and is still on record.
#[test]
fn a_call_that_is_given_up_before_its_message_is_on_record() {
    let server = ServerOptions::new().start();
    let mut peer = Peer::connect(server.address()).unwrap();
    // A header without indexing: its name and value follow their lengths (RFC 7541, 6.2.2). The value is 200
    // ms.
    let timeout = b"\x00\x0cgrpc-timeout\x04200m";
    let headers = [&call("/longshore.v1.Admin/DeleteJob")[..], timeout].concat();
    peer.send(&frame(HEADERS, END_HEADERS, 1, &headers)).unwrap();
    let line = line(&server, "DeleteJob");
    assert_eq!(line["outcome"], "given up", "{line}");
}

#[test]
fn what_an_identity_had_begun_before_it_was_taken_back_was_not_refused() {
    let (folders, checkpoints) = (Folders::new(&everything()), TempDir::new().unwrap());
    let server = cluster(&folders, checkpoints.path());
    let http = http::address(&server);
    let (operator, worker) = (folders.client("operator"), identity("worker", &["worker"], &["default"], &[]));
    Runtime::new().unwrap().block_on(async {
        let mut admin = AdminClient::new(connect(&server, &operator).await);
        let waiting = tokio::spawn(async move { admin.checkpoint(never("taken-back")).await });
        let called = || (http::metrics(&http)["longshore_calls"] >= 1.0).then_some(());
        tokio::task::block_in_place(|| eventually("the call", called));
        // The server takes this list up half a second later at the soonest.
        folders.list(&worker);
        let status = waiting.await.unwrap().expect_err("the operator is listed no longer");
        assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    });
    let line = line(&server, "Checkpoint");
    assert_eq!(line["outcome"], "unknown", "{line}");
    assert!(line["why"].as_str().unwrap().contains("that this server does not know"), "{line}");
    assert_eq!(refused(&server, FaultKind::Unauthenticated), 1.0);
}

#[test]
fn refusals_are_counted_wherever_a_call_is_refused() {
    let reader = identity("reader", &["reader"], &["default"], &[]);
    let crowd = identity("crowd", &["reader"], &["*"], &[]) + "quota = { connections = 0 }\n";
    let folders = Folders::new(
        &[everything(), reader, crowd, identity("token", &["reader"], &["*"], &[TOKEN_OF_NOBODY])].concat(),
    );
    let checkpoints = TempDir::new().unwrap();
    let server = cluster(&folders, checkpoints.path());
    let counts = || {
        [FaultKind::Forbidden, FaultKind::Unauthenticated, FaultKind::Exhausted]
            .map(|kind| refused(&server, kind))
    };
    assert_eq!(counts(), [0.0; 3]);
    Runtime::new().unwrap().block_on(async {
        let channel = connect(&server, &folders.client("reader")).await;
        let commit = v1::CommitRequest { job: "default".into(), ..Default::default() };
        let status = TrainingClient::new(channel.clone()).commit(commit).await.expect_err("a reader");
        assert_eq!(status.code(), Code::PermissionDenied);
        assert_eq!(counts(), [1.0, 0.0, 0.0], "a role that may not");
        let other = v1::DescribeRequest { job: "other".into(), ..Default::default() };
        let status = AdminClient::new(channel).describe(other).await.expect_err("another job");
        assert_eq!(status.code(), Code::PermissionDenied);
        assert_eq!(counts(), [2.0, 0.0, 0.0], "a job of others");
    });
    assert_eq!(ask(&server, &folders.token(TOKEN), &["status"]).code, 1);
    let [forbidden, strangers, exhausted] = counts();
    assert!((forbidden, exhausted) == (2.0, 0.0) && strangers >= 1.0, "{strangers} of strangers");
    assert_eq!(ask(&server, &folders.client("crowd"), &["status"]).code, 1);
    assert!(counts()[2] >= 1.0, "a connection beyond the quota");
}

/// The hash of a token that no client has. With it listed, strangers without a certificate reach the first
/// call.
const TOKEN_OF_NOBODY: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// The call itself is answered, and each chunk has its own answer. The record has one line for all refused chunks.
#[test]
fn chunks_for_the_job_of_others_are_counted_and_on_record_once() {
    let elsewhere = identity("elsewhere", &["worker"], &["team-b-*"], &[]);
    let (folders, checkpoints) = (Folders::new(&(everything() + &elsewhere)), TempDir::new().unwrap());
    let server = cluster(&folders, checkpoints.path());
    Runtime::new().unwrap().block_on(async {
        let mut tensors = TensorsClient::new(connect(&server, &folders.client("elsewhere")).await);
        let chunk = v1::PushRequest { job: "default".into(), step: 5, ..Default::default() };
        let chunks = tokio_stream::iter([chunk.clone(), chunk]);
        let mut answers = tensors.push(chunks).await.expect("a stream").into_inner();
        let mut results = Vec::new();
        while results.len() < 2 {
            results.extend(answers.message().await.unwrap().expect("a result for each").results);
        }
        for result in results {
            assert_eq!(fault_from_wire(result.refusal.unwrap()).kind, FaultKind::Forbidden);
        }
    });
    assert_eq!(refused(&server, FaultKind::Forbidden), 2.0);
    let found = lines(&server, "Push");
    assert_eq!(found.len(), 1, "{found:?}");
    let line = &found[0];
    assert_eq!(
        (&line["who"], &line["outcome"], &line["job"]),
        (&"elsewhere".into(), &"refused".into(), &"\"default\"".into())
    );
}
