//! Writes the page from the collected faults.

use std::{collections::BTreeMap, fmt::Write, fs};

use longshore_proto::{Fault, FaultKind};
use syn::Item;

use super::{faults, root, worker};

const HEAD: &str = "# Errors

This page is made from the sources by a test (`LONGSHORE_REGENERATE=1 cargo test --release -p longshore-tests --test all errors::`); change the sources, not the page.
What is wrong with a whole run, what one sees of it and what one does is in [failures.md](failures.md).

Every refused call changes nothing. Its error has a **kind**, a **field**, its **value**, the **limit** and the **remedy**, which read together as a sentence:
*field is value, but must be limit: remedy*. Python's exceptions have them as attributes, and [protocol.md](protocol.md#errors) says where they lie in a gRPC status.
Words in `{braces}` are known only when it happens; a slash stands between what one or the other case says.

## Kinds

A worker tries again by itself, until its deadline (`--deadline-s`), what is UNAVAILABLE, and in streams what is DEADLINE or CORRUPT.

| kind | gRPC code | what it says |
|---|---|---|
";

const FAULTS: &str = "
## Faults, by field

They are made by servers (*server*), by the worker's library before anything is sent (*worker*), by commands (*command*), or by whichever end reads a message or an
option first (*both*).

| field | kind | is | but must be | what to do | by |
|---|---|---|---|---|---|
";

const ERRORS: &str = "
## Errors of the worker's library

`longshore train` says them and ends with 1; Python raises the exception. Those that carry a server's fault have its field, value, limit and remedy.

| error | Python | what it says | has |
|---|---|---|---|
";

pub(crate) fn text() -> String {
    let mut page = HEAD.to_string();
    let meanings = meanings();
    for kind in FaultKind::ALL {
        let code = longshore_wire::status(&Fault::new(kind, "", "", "", "")).code();
        let meaning = meanings.get(&format!("{kind:?}")).expect("a comment on each kind");
        let _ = writeln!(page, "| {} | {code:?} | {meaning} |", kind.name());
    }
    page += FAULTS;
    for made in faults::all() {
        let cells = [&made.field, &made.kind, &made.value, &made.limit, &made.remedy].map(|text| cell(text));
        let [field, kind, value, limit, remedy] = cells;
        let _ = writeln!(page, "| {field} | {kind} | {value} | {limit} | {remedy} | {} |", made.by);
    }
    page += ERRORS;
    for error in worker::all() {
        let what = if error.what.is_empty() { String::new() } else { format!("{} ", error.what) };
        let says = cell(&format!("{what}*{}*", error.says.replace('*', "\\*")));
        let _ =
            writeln!(page, "| {} | {} | {says} | {} |", error.name, error.exception, error.fields.join(", "));
    }
    page
}

/// Returns each kind's documentation comment.
fn meanings() -> BTreeMap<String, String> {
    let source = fs::read_to_string(root().join("proto/src/fault.rs")).expect("the kinds");
    let file = syn::parse_file(&source).expect("a source that compiles");
    let kinds = file.items.iter().find_map(|item| match item {
        Item::Enum(item) if item.ident == "FaultKind" => Some(item),
        _ => None,
    });
    let variants = kinds.expect("the enum of kinds").variants.iter();
    variants.map(|variant| (variant.ident.to_string(), worker::doc(&variant.attrs))).collect()
}

/// Escapes a text for a table cell: angle brackets and bars have a meaning in Markdown.
fn cell(text: &str) -> String {
    let one_line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    one_line.replace('|', "\\|").replace('<', "&lt;").replace('[', "\\[")
}
