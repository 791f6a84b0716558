//! The Helm chart and the Kubernetes manifest. Helm's output must equal the manifest and be valid for
//! Kubernetes, and servers must start with its flags.

use std::{env, path::Path, process::Command};

use longshore_tests::{
    binaries,
    command::{done, run},
    process::Process,
    skip,
};
use tempfile::TempDir;

/// Returns the servers' flags for each case of `check_chart.py`, or None where this machine has no Helm
/// library.
fn checked() -> Option<Vec<Vec<String>>> {
    let python = env::var_os("LONGSHORE_TEST_PYTHON")
        .expect("LONGSHORE_TEST_PYTHON names no Python with helm-python-sdk: run tests/run, which makes one");
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut import = Command::new(&python);
    if run("python", import.args(["-c", "import helm_python, kubernetes_validate"])).code != 0 {
        skip::skipped(
            "this Python has no helm_python and kubernetes_validate: tests/python/requirements.txt has them",
        );
        return None;
    }
    let mut check = Command::new(python);
    check
        .arg(here.join("python/check_chart.py"))
        .arg(here.join("../deploy/helm/longshore"))
        .arg(here.join("../deploy/kubernetes/longshore.yaml"));
    let checked = run("check_chart.py", &mut check);
    assert_eq!(checked.code, 0, "{}", checked.stderr);
    let (flags, end) = checked.stdout.trim_end().rsplit_once('\n').expect("flags, and how it ended");
    assert_eq!(end, "ok");
    Some(flags.lines().map(|line| serde_json::from_str(line).expect("flags")).collect())
}

#[test]
fn servers_start_with_the_flags_of_the_chart() {
    let Some(cases) = checked() else { return };
    assert_eq!(cases.len(), 4);
    let root = TempDir::new().unwrap();
    let tls = root.path().join("tls");
    done(["tls", "init", &tls.display().to_string(), "--hosts", "localhost"]);
    for (case, flags) in cases.iter().enumerate() {
        let folder = |name: &str| {
            let folder = root.path().join(format!("{name}-{case}"));
            std::fs::create_dir_all(&folder).unwrap();
            folder.display().to_string()
        };
        // The chart's flags, but with addresses, folders and memory that a test may use.
        let here = flags.iter().map(|flag| match flag.split_once('=').unwrap_or((flag, "")) {
            (flag @ ("--listen" | "--http"), _) => format!("{flag}=127.0.0.1:0"),
            (flag @ ("--state-dir" | "--checkpoint-dir"), _) => format!("{flag}={}", folder(flag)),
            (flag @ "--tls-dir", _) => format!("{flag}={}", tls.join("server").display()),
            (flag @ ("--memory" | "--resident"), size) => {
                assert!(size.parse::<longshore_server::config::ByteSize>().is_ok(), "{size}");
                format!("{flag}=1GiB")
            }
            _ => flag.clone(),
        });
        let mut server =
            Process::start("longshored of the chart", binaries::command("longshored").args(here));
        let said = server.line().unwrap_or_default();
        assert!(said.starts_with("longshored listening on "), "{flags:?}: {said} {}", server.stderr());
        server.terminate();
        assert_eq!(server.code(), 0, "{}", server.stderr());
    }
}
