//! A stock gRPC client of any language can train. Here Python with grpcio follows docs/protocol.md from the
//! .proto files alone, and gets NumPy's results.

use std::process::Command;

use longshore_tests::{
    server::{self, ServerOptions},
    status,
};
use tempfile::TempDir;

#[test]
fn a_stock_python_client_follows_the_protocol() {
    let python = std::env::var_os("LONGSHORE_TEST_PYTHON").expect(
        "LONGSHORE_TEST_PYTHON names no Python with grpcio, grpcio-tools, numpy and blake3: run tests/run, which makes one",
    );
    let root = TempDir::new().expect("a folder for states and checkpoints");
    let options =
        ServerOptions::new().state_root(root.path()).checkpoint_dir(&root.path().join("checkpoints"));
    let servers = server::servers(3, &options.args(["--threads", "2"]));
    let addresses = server::addresses(&servers);
    let folder = env!("CARGO_MANIFEST_DIR");
    let output = Command::new(python)
        .arg(format!("{folder}/python/stock_client.py"))
        .args(["--protos", &format!("{folder}/../proto"), "--servers", &addresses.join(",")])
        .output()
        .expect("LONGSHORE_TEST_PYTHON can be started");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "the client failed ({}):\n{out}\n{err}", output.status);
    assert!(out.trim_end().ends_with("ok"), "the client did not come to its end:\n{out}\n{err}");
    // Each job made its steps on all servers, and skipped one of them.
    let jobs = status::status(&addresses);
    assert_eq!(jobs.iter().map(|job| job.job.as_str()).collect::<Vec<_>>(), ["stock-bf16", "stock-f32"]);
    for server in jobs.iter().flat_map(|job| &job.servers) {
        assert_eq!((server.version, server.applied), (6, 5), "{server:?}");
    }
}
