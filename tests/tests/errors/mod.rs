//! Checks docs/errors.md against the sources: every fault of servers, workers and commands, and every error
//! of the worker's library.
//!
//! After a change of an error: `LONGSHORE_REGENERATE=1 cargo test --release -p longshore-tests --test all
//! errors::`

mod faults;
mod page;
mod text;
mod worker;

use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// The crates' sources, and the side that makes their faults.
const ROOMS: [(&str, &str); 6] = [
    ("proto/src", "both"),
    ("proto/wire/src", "both"),
    ("server/src", "server"),
    ("server/engine/src", "server"),
    ("worker/src", "worker"),
    ("worker/cli/src", "command"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the sources in a folder, without generated code and tests.
fn sources(folder: &Path) -> Vec<(PathBuf, syn::File)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && stem != "generated" && stem != "tests" {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|end| end == "rs") && !stem.ends_with("tests") {
            let source = fs::read_to_string(&path).expect("a source");
            found.push((path, syn::parse_file(&source).expect("a source that compiles")));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

#[test]
fn the_page_of_errors_is_what_the_sources_say() {
    let page = root().join("docs/errors.md");
    let made = page::text();
    if env::var_os("LONGSHORE_REGENERATE").is_some() {
        fs::write(&page, &made).unwrap();
    }
    let kept = fs::read_to_string(&page).unwrap_or_default();
    let differs = kept.lines().zip(made.lines()).find(|(kept, made)| kept != made);
    assert!(
        kept == made,
        "docs/errors.md is not what the sources say ({differs:?}); make it again: \
         LONGSHORE_REGENERATE=1 cargo test --release -p longshore-tests --test all errors::"
    );
}

/// The page has each kind, and a fault of each form in which sources make one.
#[test]
fn the_page_of_errors_has_faults_of_every_kind() {
    let made = page::text();
    for kind in longshore_proto::FaultKind::ALL {
        let kind = kind.name();
        assert!(made.matches(&format!("| {kind} |")).count() > 0, "no {kind} in the page");
    }
    for words in [
        // The forms: a struct's method, a helper of the same file, a constant, a format string.
        "call Training.Join first",
        "ask an operator of the server to give this one more in identities.toml",
        "free space there, name more state directories, or add servers",
        "divide by the scale that the step's gradients have",
        "Only one process may run each rank",
        // A constant whose name has another value in another file.
        "| checkpoint | CORRUPT |",
    ] {
        assert!(made.contains(words), "no {words:?} in the page");
    }
}
