//! Finds which room of a crate uses which. A room is a folder or a file at the top of the crate's sources; it uses another
//! room if a path in it leads there.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// The first path found in a room that leads to another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrow {
    pub file: PathBuf,
    pub path: String,
}

/// For each room, the rooms that it uses.
pub type Arrows = BTreeMap<String, BTreeMap<String, Arrow>>;

/// The arrows between the rooms of a crate. Tests are left out.
pub fn arrows(sources: &Path) -> Arrows {
    let mut files = Vec::new();
    collect(sources, &mut Vec::new(), &mut files);
    let tests: BTreeSet<Vec<String>> = files.iter().flat_map(test_modules).collect();
    files.retain(|file| !tests.iter().any(|test| file.module.starts_with(test)));
    let rooms: BTreeSet<String> = files.iter().filter_map(|file| file.module.first().cloned()).collect();
    let roots = files.iter().filter(|file| file.module.is_empty());
    let exported: BTreeMap<String, String> =
        roots.flat_map(|root| paths(&root.text)).filter_map(|path| exported(&path, &rooms)).collect();
    let mut arrows = Arrows::new();
    for file in &files {
        let Some(room) = file.module.first() else { continue };
        for path in paths(&file.text) {
            let Some(first) = first_segment(&file.module, &path) else { continue };
            let target = exported.get(&first).filter(|_| !rooms.contains(&first)).unwrap_or(&first);
            if target != room && rooms.contains(target) {
                let arrow = Arrow { file: file.path.clone(), path: path.join("::") };
                arrows.entry(room.clone()).or_default().entry(target.clone()).or_insert(arrow);
            }
        }
    }
    arrows
}

/// Finds rooms of which each uses the next one, and the last uses the first. Returns None if there is no circle.
pub fn circle(arrows: &Arrows) -> Option<Vec<String>> {
    let mut done = BTreeSet::new();
    arrows.keys().find_map(|room| walk(room, arrows, &mut Vec::new(), &mut done))
}

fn walk(
    room: &str,
    arrows: &Arrows,
    way: &mut Vec<String>,
    done: &mut BTreeSet<String>,
) -> Option<Vec<String>> {
    if let Some(at) = way.iter().position(|earlier| earlier == room) {
        return Some(way[at..].to_vec());
    }
    if done.contains(room) {
        return None;
    }
    way.push(room.to_string());
    let found = arrows.get(room).and_then(|next| next.keys().find_map(|next| walk(next, arrows, way, done)));
    way.pop();
    done.insert(room.to_string());
    found
}

struct File {
    path: PathBuf,
    /// The module's path below the crate.
    module: Vec<String>,
    /// The source without comments and without modules of tests.
    text: String,
}

fn collect(folder: &Path, module: &mut Vec<String>, files: &mut Vec<File>) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            module.push(stem);
            collect(&path, module, files);
            module.pop();
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let mut module = module.clone();
            if !["mod", "lib", "main"].contains(&&*stem) {
                module.push(stem);
            }
            let text = without_tests(&fs::read_to_string(&path).expect("a source"));
            files.push(File { path, module, text });
        }
    }
}

/// Drops comments, and modules of tests; those in files of their own stay as `mod name;` under `#[cfg(test)]`.
fn without_tests(text: &str) -> String {
    let mut kept = String::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let next = lines.peek().copied().unwrap_or_default();
        let module = next.trim_start().trim_start_matches("pub(crate) ").starts_with("mod ");
        if is_for_tests(line) && module && next.ends_with('{') {
            // rustfmt gives the end the indentation of the beginning.
            let end = format!("{}}}", &line[..line.len() - line.trim_start().len()]);
            lines.by_ref().find(|line| *line == end);
            continue;
        }
        kept.push_str(line.split("//").next().unwrap_or_default());
        kept.push('\n');
    }
    kept
}

/// Whether the line says that what follows it is built for tests alone.
fn is_for_tests(line: &str) -> bool {
    let condition = line.trim().strip_prefix("#[cfg(").and_then(|line| line.strip_suffix(")]"));
    condition.is_some_and(|condition| condition == "test" || condition.starts_with("all(test"))
}

fn test_modules(file: &File) -> Vec<Vec<String>> {
    let after = file.text.split("#[cfg(test)]").skip(1).map(str::trim_start);
    let names = after.filter_map(|text| text.strip_prefix("mod ")?.split_once(';')).map(|(name, _)| name);
    names.map(|name| [&file.module[..], &[name.trim().to_string()]].concat()).collect()
}

/// All paths of a source that begin with `crate`, `self` or `super`, or stand in a `use`.
fn paths(text: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut rest = String::new();
    let mut left = text;
    while let Some(at) = next_use(left) {
        rest.push_str(&left[..at]);
        let (tree, after) = left[at..].split_once(';').unwrap_or((&left[at..], ""));
        expand(tree.trim_start_matches("use "), &mut Vec::new(), &mut found);
        left = after;
    }
    rest.push_str(left);
    for start in ["crate::", "super::"] {
        for (at, _) in rest.match_indices(start) {
            let before = rest[..at].chars().next_back().unwrap_or(' ');
            if !is_name(before) && before != ':' {
                let end = rest[at..].find(|c| !is_name(c) && c != ':').unwrap_or(rest.len() - at);
                found.push(rest[at..at + end].split("::").map(str::to_string).collect());
            }
        }
    }
    found
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Where the next `use` begins.
fn next_use(text: &str) -> Option<usize> {
    let begins = |at: &usize| {
        let line = text[..*at].rsplit('\n').next().unwrap_or_default().trim();
        line.is_empty() || line.starts_with("pub")
    };
    text.match_indices("use ").map(|(at, _)| at).find(begins)
}

/// The paths of `a::{b, c::d}`.
fn expand(tree: &str, prefix: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    let mut depth = 0;
    let parts = tree.split(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    });
    for part in parts.map(str::trim).filter(|part| !part.is_empty()) {
        let (path, branches) = match part.split_once('{') {
            Some((path, branches)) => (path, branches.strip_suffix('}')),
            None => (part, None),
        };
        let path = path.split(" as ").next().unwrap_or_default();
        let known = prefix.len();
        prefix.extend(path.split("::").map(str::trim).filter(|name| !name.is_empty()).map(str::to_string));
        match branches {
            Some(branches) => expand(branches, prefix, found),
            None => found.push(prefix.clone()),
        }
        prefix.truncate(known);
    }
}

/// A name that the crate's root exports from a room (`pub use room::Name`), and the room.
fn exported(path: &[String], rooms: &BTreeSet<String>) -> Option<(String, String)> {
    let path = path.strip_prefix(&["self".to_string()][..]).unwrap_or(path);
    let (room, name) = (path.first()?, path.last()?);
    (path.len() > 1 && rooms.contains(room)).then(|| (name.clone(), room.clone()))
}

/// The name below the crate's root at which `path` begins, if the path stands in `module`.
fn first_segment(module: &[String], path: &[String]) -> Option<String> {
    let mut base = match path.first()?.as_str() {
        "crate" => Vec::new(),
        "self" | "super" => module.to_vec(),
        _ => return None,
    };
    let ups = path.iter().filter(|name| *name == "super").count();
    base.truncate(base.len().saturating_sub(ups));
    let names = path.iter().filter(|name| !["crate", "self", "super"].contains(&name.as_str()));
    base.into_iter().chain(names.cloned()).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crate_of(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    #[test]
    fn arrows_follow_uses_paths_and_what_the_root_names_again() {
        let sources = crate_of(&[
            ("lib.rs", "mod a;\nmod b;\nmod c;\npub use b::Thing;\n"),
            ("a/mod.rs", "mod deep;\nuse std::fmt;\n// use crate::c;\n"),
            ("a/deep.rs", "use super::super::{\n    b::{self, x::Y},\n};\n"),
            ("b.rs", "fn f() -> crate::c::Z { todo!() }\n"),
            ("c.rs", "#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n#[cfg(test)]\nmod late;\n"),
            ("c/late.rs", "use crate::a::deep;\n"),
            ("d.rs", "use crate::Thing;\n"),
        ]);
        let found = arrows(sources.path());
        let pairs: Vec<(String, String)> =
            found.iter().flat_map(|(from, to)| to.keys().map(|to| (from.clone(), to.clone()))).collect();
        let expected = [("a", "b"), ("b", "c"), ("d", "b")];
        assert_eq!(pairs, expected.map(|(from, to)| (from.to_string(), to.to_string())));
        assert_eq!(circle(&found), None);
    }

    #[test]
    fn a_circle_is_found_however_long() {
        let sources = crate_of(&[
            ("lib.rs", ""),
            ("a.rs", "use crate::b as other;\n"),
            ("b.rs", "pub(crate) use crate::c::X;\n"),
            ("c.rs", "fn f(_: super::a::Y) {}\n"),
            ("d.rs", "use crate::a;\n"),
        ]);
        assert_eq!(circle(&arrows(sources.path())).unwrap(), ["a", "b", "c"]);
    }
}
