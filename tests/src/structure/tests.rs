//! Arrows and circles of small crates.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{OWN_FILE, arrows, circles};

fn crate_of(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    folder
}

/// The arrows of a crate: folder, from, to.
fn found(files: &[(&str, &str)]) -> Vec<[String; 3]> {
    let sources = crate_of(files);
    let mut found = Vec::new();
    for (folder, arrows) in arrows(sources.path()) {
        for (from, targets) in arrows {
            let folder = folder.display().to_string();
            found.extend(targets.into_keys().map(|to| [folder.clone(), from.clone(), to]));
        }
    }
    found
}

/// The circles of a crate, with their folders.
fn all_circles(files: &[(&str, &str)]) -> Vec<(PathBuf, Vec<String>)> {
    let sources = crate_of(files);
    let folders = arrows(sources.path()).into_iter();
    let circles =
        folders.flat_map(|(folder, arrows)| circles(&arrows).into_iter().map(move |c| (folder.clone(), c)));
    circles.map(|(folder, circle)| (folder, circle.into_iter().collect())).collect()
}

#[test]
fn arrows_follow_uses_paths_and_what_the_root_names_again() {
    let found = found(&[
        ("lib.rs", "mod a;\nmod b;\nmod c;\nmod d;\npub use b::Thing;\n"),
        ("a/mod.rs", "mod deep;\nuse std::fmt;\n// use crate::c;\n"),
        ("a/deep.rs", "use super::super::{\n    b::{self, x::Y},\n};\n"),
        ("b.rs", "pub struct Thing;\nfn f() -> crate::c::Z { todo!() }\n"),
        ("c.rs", "#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n#[cfg(test)]\nmod late;\n"),
        ("c/late.rs", "use crate::a::deep;\n"),
        ("d.rs", "use crate::Thing;\n"),
    ]);
    assert_eq!(found, [["", "a", "b"], ["", "b", "c"], ["", "d", "b"]]);
}

#[test]
fn an_arrow_leads_to_the_file_that_defines_what_is_named() {
    let found = found(&[
        ("lib.rs", "mod a;\n"),
        (
            "a/mod.rs",
            "mod p;\nmod q;\nmod r;\npub(crate) use q::Q as Other;\nuse std::io;\npub const OWN: u8 = 1;\n",
        ),
        ("a/p.rs", "use super::{Other, io};\n"),
        ("a/q.rs", "use super::r;\npub struct Q;\nfn f() { r::g::<io::Error>() }\n"),
        ("a/r.rs", "fn g() -> u8 { super::OWN }\n"),
    ]);
    assert_eq!(found, [["a", "p", "q"], ["a", "q", "r"], ["a", "r", OWN_FILE]]);
}

#[test]
fn a_circle_is_found_however_long_and_however_deep() {
    let found = all_circles(&[
        ("lib.rs", "mod x;\n"),
        ("x/mod.rs", "mod y;\n"),
        ("x/y/mod.rs", "mod a;\nmod b;\nmod c;\nmod d;\npub(super) use c::X;\n"),
        ("x/y/a.rs", "use super::b as other;\n"),
        ("x/y/b.rs", "pub(crate) use super::X;\n"),
        ("x/y/c.rs", "pub struct X;\nfn f(_: crate::x::y::a::Y) {}\n"),
        ("x/y/d.rs", "use super::a;\n"),
    ]);
    assert_eq!(found, [(Path::new("x/y").to_path_buf(), ["a", "b", "c"].map(str::to_string).to_vec())]);
}

#[test]
fn a_parent_is_in_a_circle_only_if_it_uses_what_its_child_defines() {
    let child = "use super::Whole;\npub struct Part;\nfn f(_: Whole) {}\n";
    let with = |parent: &str| all_circles(&[("lib.rs", "mod a;\n"), ("a.rs", parent), ("a/child.rs", child)]);
    assert_eq!(with("mod child;\npub use child::Part;\npub struct Whole;\n"), []);
    let expected = [(PathBuf::from("a"), vec!["child".to_string(), OWN_FILE.to_string()])];
    assert_eq!(with("mod child;\npub use child::Part;\npub struct Whole(Part);\n"), expected);
    assert_eq!(with("mod child;\npub struct Whole(child::Part);\n"), expected);
}

#[test]
fn a_type_in_several_files_is_one_thing() {
    let whole = "mod child;\nuse child::Part;\npub struct Whole<T>(Part<T>);\n";
    let with = |child: &str| {
        let child = format!("use super::Whole;\npub struct Part<T>(T);\n\n{child} {{}}\n");
        all_circles(&[("lib.rs", "mod a;\n"), ("a.rs", whole), ("a/child.rs", &child)]).len()
    };
    assert_eq!(with("impl<T: Into<u8>> Whole<T>"), 0);
    assert_eq!(with("impl<T> Drop for Whole<T>"), 1);
}
