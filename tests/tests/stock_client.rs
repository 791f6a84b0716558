//! Any language's stock gRPC client can train: Python with grpcio makes a step from the .proto files alone, and gets
//! what NumPy computes.

use std::process::Command;

use longshore_tests::conformance::cluster::Cluster;

#[test]
fn a_stock_python_client_trains_one_step() {
    let python = std::env::var_os("LONGSHORE_TEST_PYTHON").expect(
        "LONGSHORE_TEST_PYTHON names no Python with grpcio, grpcio-tools and numpy: run tests/run, which makes one",
    );
    let cluster = Cluster::start(1);
    let folder = env!("CARGO_MANIFEST_DIR");
    let output = Command::new(python)
        .arg(format!("{folder}/python/stock_client.py"))
        .args(["--protos", &format!("{folder}/../proto"), "--server", &cluster.addresses()[0]])
        .output()
        .expect("LONGSHORE_TEST_PYTHON can be started");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "the client failed ({}):\n{out}\n{err}", output.status);
    assert!(out.trim_end().ends_with("ok"), "the client did not come to its end:\n{out}\n{err}");
    // The client was here: both of its jobs made their step.
    for job in ["stock-bf16", "stock-f32"] {
        assert_eq!(cluster.raw(0).progress(job).applied, 1, "{job}");
    }
}
