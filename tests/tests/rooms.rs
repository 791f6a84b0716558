//! Checks the structure in ARCHITECTURE.md: forbidden dependencies of crates, and the places of `unsafe`.

use std::process::Command;

/// The repository's root.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

#[test]
fn crates_depend_on_nothing_of_other_rooms() {
    for (package, known, banned) in [
        (
            "longshore-engine",
            "rustix",
            "tokio tonic prost hyper longshore_wire longshore_server longshore_worker",
        ),
        ("longshore-worker", "tonic", "longshore_server longshore_engine gemm_f32 clap cudarc"),
        ("longshore-proto", "blake3", "tokio tonic prost bytes rustix"),
    ] {
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_string());
        let mut tree = Command::new(cargo);
        tree.args(["tree", "--locked", "--prefix", "none", "--edges", "normal", "--format", "{lib}"]);
        let output = tree.args(["-p", package]).current_dir(ROOT).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        let found: Vec<&str> = text.lines().collect();
        assert!(found.contains(&known), "{package} lacks {known}, so this is no list of crates: {found:?}");
        for banned in banned.split(' ') {
            assert!(!found.contains(&banned), "{package} must not depend on {banned}");
        }
    }
}

/// The workspace denies `unsafe`, so only an attribute allows it. Such attributes may stand only in the rooms that
/// ARCHITECTURE.md names.
#[test]
fn unsafe_stays_in_its_rooms() {
    let rooms = [
        "memory/src/lib.rs",
        "server/engine/src/kernels/",
        "server/engine/src/io/",
        "worker/src/device/cuda",
        "worker/cli/src/train/gpt/product.rs",
        "worker/python/src/lib.rs",
    ];
    let crates = "memory proto proto/wire server server/engine worker worker/cli worker/python tests";
    let sources = crates.split(' ').map(|name| format!("{name}/src"));
    let mut grep = Command::new("grep");
    grep.args(["-rlE", "(allow|expect)\\([^)]*unsafe_code"]).args(sources);
    let output = grep.current_dir(ROOT).output().unwrap();
    let found = String::from_utf8(output.stdout).unwrap();
    assert!(
        found.lines().count() > 4,
        "only these allow it: {found}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for file in found.lines() {
        assert!(rooms.iter().any(|room| file.starts_with(room)), "{file} allows unsafe outside its rooms");
    }
}
