//! Reads a source file for the search for circles: what it defines, what it takes in by `use`, and what it names.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

pub(super) struct Source {
    pub(super) path: PathBuf,
    /// The module's path in the crate.
    pub(super) module: Vec<String>,
    /// The items that begin at the margin, without modules that have files of their own.
    pub(super) items: BTreeSet<String>,
    pub(super) uses: Vec<Use>,
    /// The paths of two names or more that stand outside of every `use`.
    pub(super) paths: BTreeSet<Vec<String>>,
    /// All words that stand outside of every `use`.
    pub(super) words: BTreeSet<String>,
    /// The types that are defined elsewhere and have an `impl` of their own here.
    pub(super) continued: BTreeSet<String>,
}

/// One name that a `use` brings in.
pub(super) struct Use {
    pub(super) path: Vec<String>,
    /// The name by which the file knows it, or `*` for all names of a module.
    pub(super) name: String,
    /// Whether it begins at the margin, so that other files may see it too.
    pub(super) outer: bool,
    pub(super) is_public: bool,
}

/// The sources of a crate, without modules of tests.
pub(super) fn sources(folder: &Path) -> Vec<Source> {
    let mut files = Vec::new();
    collect(folder, &mut Vec::new(), &mut files);
    let tests: BTreeSet<Vec<String>> =
        files.iter().flat_map(|(_, module, text)| test_modules(module, text)).collect();
    files.retain(|(_, module, _)| !tests.iter().any(|test| module.starts_with(test)));
    files.into_iter().map(|(path, module, text)| read(path, module, &text)).collect()
}

fn collect(folder: &Path, module: &mut Vec<String>, files: &mut Vec<(PathBuf, Vec<String>, String)>) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            module.push(stem);
            collect(&path, module, files);
            module.pop();
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let mut module = module.clone();
            // A program beside a library is a crate of its own.
            if stem == "main" && folder.join("lib.rs").exists() {
                continue;
            }
            if !["mod", "lib", "main"].contains(&&*stem) {
                module.push(stem);
            }
            let text = without_inline(&without_tests(&fs::read_to_string(&path).expect("a source")));
            files.push((path, module, text));
        }
    }
}

/// Drops comments and inline modules of tests. A module of tests in a file of its own stays, as `#[cfg(test)] mod
/// name;`.
fn without_tests(text: &str) -> String {
    let mut kept = String::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let next = lines.peek().copied().unwrap_or_default();
        let module = next.trim_start().trim_start_matches("pub(crate) ").starts_with("mod ");
        if is_for_tests(line) && module && next.ends_with('{') {
            // rustfmt indents the last line of the module as its first one.
            let end = format!("{}}}", &line[..line.len() - line.trim_start().len()]);
            lines.by_ref().find(|line| *line == end);
            continue;
        }
        kept.push_str(line.split("//").next().unwrap_or_default());
        kept.push('\n');
    }
    kept
}

/// Writes `self::` for `super::` in inline modules. There `super` means the file itself, and the search knows no
/// modules smaller than a file.
fn without_inline(text: &str) -> String {
    let mut inside = false;
    let mut kept = String::new();
    for line in text.lines() {
        if !line.starts_with(char::is_whitespace) && !line.is_empty() {
            inside = line.split_whitespace().any(|word| word == "mod") && line.ends_with('{');
        }
        let line = if inside { line.replacen("super::", "self::", 1) } else { line.to_string() };
        kept.push_str(&line);
        kept.push('\n');
    }
    kept
}

/// Whether the line is an attribute that builds the next item for tests alone.
fn is_for_tests(line: &str) -> bool {
    let condition = line.trim().strip_prefix("#[cfg(").and_then(|line| line.strip_suffix(")]"));
    condition.is_some_and(|condition| condition == "test" || condition.starts_with("all(test"))
}

/// The modules of tests that a file declares and that have files of their own.
fn test_modules(module: &[String], text: &str) -> Vec<Vec<String>> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let conditions = (0..lines.len()).filter(|at| is_for_tests(lines[*at]));
    let declared = conditions.filter_map(|at| lines[at..].iter().find(|line| !line.starts_with("#[")));
    let names = declared.filter_map(|line| line.trim_start_matches("pub(crate) ").strip_prefix("mod "));
    let names = names.filter_map(|name| name.strip_suffix(';'));
    names.map(|name| [module, &[name.to_string()]].concat()).collect()
}

fn read(path: PathBuf, module: Vec<String>, text: &str) -> Source {
    let (uses, rest) = uses(text);
    let items: BTreeSet<String> = rest.lines().filter_map(item).collect();
    let continued = rest.split("\nimpl").skip(1).filter_map(continued);
    let continued = continued.filter(|name| !items.contains(name)).collect();
    let is_declaration = |line: &&str| line.contains("mod ") && line.ends_with(';');
    let rest: Vec<&str> = rest.lines().filter(|line| !is_declaration(line)).collect();
    let (paths, words) = names(&rest.join("\n"));
    Source { path, module, items, uses, paths, words, continued }
}

/// The type of an `impl` block, unless the block is of a trait. `after` is the text after the word `impl`.
fn continued(after: &str) -> Option<String> {
    let mut depth = 0;
    let parameters = after.find(|c| {
        depth += i32::from(c == '<') - i32::from(c == '>');
        depth == 0
    })?;
    let kind = after[parameters..].trim_start_matches('>').trim_start();
    let head = &kind[..kind.find('{')?];
    let end = kind.find(|c| !is_name(c) && c != ':')?;
    let name = kind[..end].rsplit("::").next()?;
    (!head.split_whitespace().any(|word| word == "for")).then(|| name.to_string())
}

/// The name of the item that begins on this line, if the line begins at the margin.
fn item(line: &str) -> Option<String> {
    const KINDS: [&str; 9] =
        ["struct", "enum", "union", "trait", "fn", "static", "type", "mod", "macro_rules!"];
    const BEFORE: [&str; 6] = ["pub", "unsafe", "async", "extern", "\"C\"", "const"];
    if line.starts_with(char::is_whitespace) {
        return None;
    }
    let is_before = |word: &str| BEFORE.contains(&word) || word.starts_with("pub(") || word.ends_with(')');
    let words: Vec<&str> = line.split_whitespace().collect();
    let kind = words.iter().position(|word| !is_before(word))?;
    let name = match words[kind] {
        word if KINDS.contains(&word) => *words.get(kind + 1)?,
        word if kind > 0 && words[kind - 1] == "const" => word,
        _ => return None,
    };
    let declared = words[kind] == "mod" && name.ends_with(';');
    let end = name.find(|c| !is_name(c)).unwrap_or(name.len());
    (!declared && end > 0).then(|| name[..end].to_string())
}

/// The names that a source takes in by `use`, and the source without any `use`.
fn uses(text: &str) -> (Vec<Use>, String) {
    let mut found = Vec::new();
    let mut rest = String::new();
    let mut left = text;
    while let Some(at) = next_use(left) {
        rest.push_str(&left[..at]);
        let line = left[..at].rsplit('\n').next().unwrap_or_default();
        let (outer, is_public) = (!line.starts_with(' '), line.trim().starts_with("pub"));
        let (tree, after) = left[at..].split_once(';').unwrap_or((&left[at..], ""));
        let mut names = BTreeSet::new();
        expand(tree.trim_start_matches("use "), &mut Vec::new(), &mut names);
        found.extend(names.into_iter().map(|(path, name)| Use { path, name, outer, is_public }));
        left = after;
    }
    rest.push_str(left);
    (found, rest)
}

/// Where the next `use` begins.
fn next_use(text: &str) -> Option<usize> {
    let begins = |at: &usize| {
        let line = text[..*at].rsplit('\n').next().unwrap_or_default().trim();
        line.is_empty() || line.starts_with("pub")
    };
    text.match_indices("use ").map(|(at, _)| at).find(begins)
}

/// The paths in a tree such as `a::{b, c::d as e}`, each with the name that the file knows it by.
fn expand(tree: &str, prefix: &mut Vec<String>, found: &mut BTreeSet<(Vec<String>, String)>) {
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
        let (path, other) = path.split_once(" as ").map_or((path, None), |(path, name)| (path, Some(name)));
        let known = prefix.len();
        prefix.extend(path.split("::").map(str::trim).filter(|name| !name.is_empty()).map(str::to_string));
        match branches {
            Some(branches) => expand(branches, prefix, found),
            None => {
                let itself = prefix.last().is_some_and(|last| last == "self") && prefix.len() > 1;
                let path = prefix[..prefix.len() - usize::from(itself)].to_vec();
                let name = other.map(str::trim).or(path.last().map(String::as_str)).unwrap_or_default();
                let name = name.to_string();
                found.insert((path, name));
            }
        }
        prefix.truncate(known);
    }
}

/// The paths and the words of a text without `use`.
fn names(text: &str) -> (BTreeSet<Vec<String>>, BTreeSet<String>) {
    let (mut paths, mut words) = (BTreeSet::new(), BTreeSet::new());
    let mut left = text;
    while let Some(at) = left.find(is_name) {
        let passed = &text[..text.len() - left.len() + at];
        // A range has two dots.
        let before = passed.chars().next_back().filter(|_| !passed.ends_with(".."));
        let mut path = Vec::new();
        left = &left[at..];
        loop {
            let end = left.find(|c| !is_name(c)).unwrap_or(left.len());
            path.push(left[..end].to_string());
            left = &left[end..];
            match left.strip_prefix("::") {
                Some(next) if next.starts_with(is_name) => left = next,
                _ => break,
            }
        }
        // A name after a dot is a method or a field. A name before a colon is a field or a variable.
        let is_member = before == Some('.') || (left.starts_with(':') && !left.starts_with("::"));
        if !is_member || path.len() > 1 {
            words.extend(path.iter().cloned());
        }
        if path.len() > 1 && !matches!(before, Some(':' | '.')) {
            paths.insert(path);
        }
    }
    (paths, words)
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}
