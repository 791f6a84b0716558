//! The structure that ARCHITECTURE.md promises: which room may use what, and where `unsafe` may be.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use longshore_tests::structure::{Arrow, arrows, circles};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The names of all crates that a package is built from, without its own development dependencies.
fn dependencies(package: &str) -> Vec<String> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_string());
    let output = Command::new(cargo)
        .current_dir(root())
        .args([
            "tree", "--locked", "--prefix", "none", "--edges", "normal", "--format", "{lib}", "-p", package,
        ])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_string).collect()
}

#[test]
fn the_engine_knows_no_network() {
    let found = dependencies("longshore-engine");
    assert!(found.contains(&"rustix".to_string()), "the list is not what it should be: {found:?}");
    for banned in
        ["tokio", "tonic", "prost", "hyper", "longshore_wire", "longshore_server", "longshore_worker"]
    {
        assert!(!found.contains(&banned.to_string()), "the engine must not depend on {banned}");
    }
}

#[test]
fn the_worker_library_knows_no_server() {
    let found = dependencies("longshore-worker");
    assert!(found.contains(&"tonic".to_string()), "the list is not what it should be: {found:?}");
    for banned in ["longshore_server", "longshore_engine", "gemm_f32", "clap", "cudarc"] {
        assert!(!found.contains(&banned.to_string()), "the worker library must not depend on {banned}");
    }
}

#[test]
fn the_domain_types_know_no_transport() {
    let found = dependencies("longshore-proto");
    assert!(found.contains(&"blake3".to_string()), "the list is not what it should be: {found:?}");
    for banned in ["tokio", "tonic", "prost", "bytes", "rustix"] {
        assert!(!found.contains(&banned.to_string()), "the domain types must not depend on {banned}");
    }
}

/// Rooms are the folders and files at the top of a crate. What holds for them holds in every folder below.
#[test]
fn no_room_uses_itself_by_way_of_others() {
    let mut said = Vec::new();
    for sources in [
        "memory/src",
        "proto/src",
        "proto/wire/src",
        "server/src",
        "server/engine/src",
        "worker/src",
        "worker/cli/src",
        "worker/python/src",
        "tests/src",
    ] {
        let folders = arrows(&root().join(sources));
        assert!(folders.contains_key(Path::new("")), "no room of {sources} uses another one");
        for (folder, arrows) in folders {
            let name =
                Path::new(sources).join(&folder).display().to_string().trim_end_matches('/').to_string();
            for circle in circles(&arrows) {
                said.push(format!("a circle in {name}:"));
                for (from, to) in circle.iter().flat_map(|from| circle.iter().map(move |to| (from, to))) {
                    let Some(Arrow { file, path }) = arrows.get(from).and_then(|arrows| arrows.get(to))
                    else {
                        continue;
                    };
                    said.push(format!("  {from} uses {to}: {path} in {}", file.display()));
                }
            }
        }
    }
    assert!(said.is_empty(), "{}", said.join("\n"));
}

#[test]
fn unsafe_stays_in_its_rooms() {
    let rooms = [
        "memory/src",
        "server/engine/src/kernels",
        "server/engine/src/io",
        "worker/src/device/cuda",
        "worker/cli/src/train/gpt/product",
        "worker/python/src/memory",
    ];
    let mut sources = Vec::new();
    for room in [
        "memory/src",
        "proto/src",
        "proto/wire/src",
        "server",
        "worker/src",
        "worker/cli/src",
        "worker/python/src",
        "tests/src",
    ] {
        collect(&root().join(room), &mut sources);
    }
    assert!(sources.len() > 100, "only {} sources found", sources.len());
    for path in sources {
        let relative = path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).unwrap();
        let allowed = rooms.iter().any(|room| relative.starts_with(room));
        let found = text.lines().position(|line| {
            let code = line.split("//").next().unwrap_or_default();
            code.contains("unsafe {") || code.contains("unsafe impl") || code.contains("unsafe fn")
        });
        assert!(
            allowed || found.is_none(),
            "{relative}:{} uses unsafe outside its rooms",
            found.unwrap_or(0) + 1
        );
    }
}

fn collect(folder: &Path, sources: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push(path);
        }
    }
}
