//! Holds docs/errors.md to the sources. The text of each row stands in a source file, and each kind has its gRPC code.
//! Each error of the worker's library has a row.

use std::{fs, path::Path};

use longshore_proto::{Fault, FaultKind};

const ROOMS: [&str; 6] =
    ["proto/src", "proto/wire/src", "server/src", "server/engine/src", "worker/src", "worker/cli/src"];

/// Adds the sources of a folder, with continued lines joined.
fn read(folder: &Path, sources: &mut String) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            read(&path, sources);
        } else if path.extension().is_some_and(|end| end == "rs") {
            let source = fs::read_to_string(&path).expect("a source").replace("\\\"", "\"");
            sources.extend(source.split("\\\n").map(str::trim_start));
        }
    }
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
    let mut sources = String::new();
    ROOMS.iter().for_each(|room| read(&root.join(room), &mut sources));
    let mut rows = 0;
    for row in page.lines() {
        let text = row.replace("&lt;", "<").replace("\\[", "[").replace("\\|", "|");
        let cells: Vec<&str> = text.trim_matches(['|', ' ']).split(" | ").collect();
        let [field, kind, _, limit, remedy, _] = cells[..] else { continue };
        let Some(_) = FaultKind::from_name(kind) else { continue };
        rows += 1;
        let fields = field.split([',', '.']).flat_map(fixed).map(str::trim);
        for part in fields.chain(fixed(limit)).chain(fixed(remedy)) {
            assert!(
                sources.contains(part),
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
    let mut errors = String::new();
    read(&root.join("worker/src/error"), &mut errors);
    let attributes = errors.split("#[error(").skip(1);
    for said in attributes.filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next()) {
        let lacks = fixed(said).find(|part| !page.contains(part));
        assert_eq!(lacks, None, "docs/errors.md lacks {said:?}");
    }
}
