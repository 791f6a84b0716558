//! What an identity may not do is refused with the reason, and nothing changes.

use std::{collections::BTreeSet, path::Path};

use http_body_util::BodyExt;
use longshore_tests::{
    server::{Longshored, ServerOptions},
    tls::{Folders, identity},
};
use longshore_wire::{Channel, tls::Credentials};
use longshore_worker::session::Address;
use tokio::runtime::Runtime;
use tonic::body::Body;
use tower_service::Service;

use super::{TOKEN, TOKEN_SHA256, ask, train, version};

fn cluster() -> (Folders, Longshored) {
    let folders = Folders::new(
        &[
            identity("operator", &["operator"], &["*"], &[]),
            identity("worker", &["worker"], &["default"], &[]),
            identity("reader", &["reader"], &["default"], &[]),
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
    // Who has other jobs is not told of this one.
    assert!(ask(&server, &elsewhere, &["status"]).stdout.lines().all(|line| !line.contains("default")));
    let deleted = ask(&server, &operator, &["delete", "--job", "default"]);
    assert_eq!(deleted.code, 0, "{}", deleted.stderr);
    is_on_record(&server);
}

/// Checks the lines that are logged of operators' calls.
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

/// The calls of all services, as the .proto files have them.
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

/// Makes a call with an empty message. Returns its status, and what came with it.
async fn call(channel: &mut Channel, path: &str) -> (i32, String) {
    let body = Body::new(
        http_body_util::Full::new(bytes::Bytes::from_static(&[0; 5])).map_err(|never| match never {}),
    );
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
    const PERMISSION_DENIED: i32 = 7;
    const UNAUTHENTICATED: i32 = 16;
    let (folders, server) = cluster();
    let runtime = Runtime::new().unwrap();
    runtime.block_on(async {
        let connect = async |dir: &Path| {
            let credentials = Credentials::read(dir).unwrap();
            Address::new(server.address(), Some(&credentials)).unwrap().connect().await.unwrap()
        };
        let mut elsewhere = connect(&folders.token(TOKEN)).await;
        let mut unknown = connect(&folders.token("guessed")).await;
        assert!(calls().len() >= 25, "{:?}", calls());
        for path in calls() {
            let (status, said) = call(&mut elsewhere, &path).await;
            match path.rsplit('/').next() {
                // It names those jobs that the caller has.
                Some("ListJobs") => assert_eq!(status, 0),
                // Each chunk has an answer of its own.
                Some("Push") => assert!(said.contains("FORBIDDEN"), "{path}: {status} {said}"),
                _ => assert_eq!(status, PERMISSION_DENIED, "{path}: {said}"),
            }
            assert_eq!(call(&mut unknown, &path).await.0, UNAUTHENTICATED, "{path}");
        }
    });
}
