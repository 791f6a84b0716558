//! Holds docs/errors.md to the sources. The text of each row stands in a source file, and each kind has its gRPC code.
//! Each fault's remedy and each error of the worker's library have a row.

use std::{fs, path::Path};

use longshore_proto::{Fault, FaultKind};

const ROOMS: [&str; 6] =
    ["proto/src", "proto/wire/src", "server/src", "server/engine/src", "worker/src", "worker/cli/src"];

/// Adds the sources of a folder without tests, with continued lines joined and `'` for quotes in texts.
fn read(folder: &Path, sources: &mut Vec<String>) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.contains("test") {
            continue;
        } else if path.is_dir() {
            read(&path, sources);
        } else if name.ends_with(".rs") {
            let source = fs::read_to_string(&path).expect("a source").replace("\\\"", "'");
            let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            sources.push(source.split("\\\n").map(str::trim_start).collect());
        }
    }
}

/// Returns the last text of a call's arguments or of a statement, and the code behind that text.
fn last_text(code: &str) -> (&str, &str) {
    let (mut depth, mut last, mut parts) = (0, "", code.split('"'));
    while let Some(part) = parts.next() {
        let end = part.find(|c| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            depth < 0 || c == ';'
        });
        if let Some(end) = end {
            return (last, &part[..end]);
        }
        last = parts.next().unwrap_or_default();
    }
    (last, "")
}

/// Returns the remedies of the faults that a source makes. A fault without a text as remedy gives its last text.
fn remedies(source: &str) -> impl Iterator<Item = &str> {
    let calls = ["Fault::new(", "Fault::invalid("].map(|call| source.match_indices(call)).into_iter();
    calls.flatten().map(|(at, call)| {
        let (text, behind) = last_text(&source[at + call.len()..]);
        match source[..at].rsplit_once("let remedy = ") {
            Some((_, before)) if behind.contains("remedy") => last_text(before).0,
            _ => text,
        }
    })
}

/// Returns the parts of a text between its `{values}`. Parts of at most three characters tell nothing and are left out.
fn fixed(text: &str) -> impl Iterator<Item = &str> {
    let parts = text.split('{').enumerate();
    let outside = parts
        .map(|(at, part)| part.split_once('}').map_or(part, |(_, rest)| if at > 0 { rest } else { part }));
    outside.flat_map(|part| part.split(" / ")).filter(|part| part.trim().len() > 3)
}

#[test]
fn the_page_of_errors_is_what_the_sources_say() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(root.join("docs/errors.md")).expect("the page");
    let page = page.replace("&lt;", "<").replace("\\[", "[").replace("\\|", "|").replace('"', "'");
    let mut sources = Vec::new();
    ROOMS.iter().for_each(|room| read(&root.join(room), &mut sources));
    let mut rows = 0;
    for row in page.lines() {
        let cells: Vec<&str> = row.trim_matches(['|', ' ']).split(" | ").collect();
        let [field, kind, _, limit, remedy, _] = cells[..] else { continue };
        let Some(_) = FaultKind::from_name(kind) else { continue };
        rows += 1;
        let fields = field.split([',', '.']).flat_map(fixed).map(str::trim);
        for part in fields.chain(fixed(limit)).chain(fixed(remedy)) {
            assert!(
                sources.iter().any(|source| source.contains(part)),
                "no source says {part:?}, as a row of docs/errors.md does: {row}"
            );
        }
    }
    assert!(rows > 300, "{rows} rows");
    for kind in FaultKind::ALL {
        let code = longshore_wire::status(&Fault::new(kind, "", "", "", "")).code();
        assert!(
            page.contains(&format!("\n| {} | {code:?} | ", kind.name())),
            "docs/errors.md lacks {kind:?}"
        );
    }
    let mut errors = Vec::new();
    read(&root.join("worker/src/error"), &mut errors);
    let attributes = errors.iter().flat_map(|source| source.split("#[error(").skip(1));
    let attributes = attributes.filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next());
    for said in attributes.chain(sources.iter().flat_map(|source| remedies(source))) {
        let lacks = fixed(said).find(|part| !page.contains(part));
        assert_eq!(lacks, None, "docs/errors.md lacks {said:?}");
    }
}
