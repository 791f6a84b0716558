//! Finds circles between the entries of a folder: its files and folders, and the file that the folder itself has.
//!
//! An arrow goes from entry A to entry B of one folder if a file of A names what a file of B defines. Only names in `use`
//! and in paths count. A method call makes no arrow.
//!
//! - A name leads to the file that defines it, also where `mod.rs` re-exports it. If a sibling passes the name on, an
//!   arrow goes to that sibling too.
//! - `mod.rs` is an entry of its own folder: it may name its children, or they may name what it defines, but not both
//!   in a circle.
//! - `mod child;` makes no arrow. Nor does a `pub use` of a child's item that the parent names nowhere else. Both are a
//!   table of contents.
//! - A type with `impl` blocks in several files is one thing. So a file with one of those blocks has no arrow by the
//!   type's name.
//! - A file makes no arrow by naming a folder that it lies in, as in `pub(in crate::folder)`.
//! - Tests make no arrows.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use super::{
    resolve::{Crate, Module, Stop},
    source::Source,
};

/// Why one entry uses another: the first path that leads there, and the file that names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrow {
    pub file: PathBuf,
    pub path: String,
}

/// For each entry of a folder, the entries that it uses.
pub type Arrows = BTreeMap<String, BTreeMap<String, Arrow>>;

/// The name of the folder's own file among its entries.
pub const OWN_FILE: &str = "mod.rs";

/// The arrows in every folder of a crate, by the folder's path in the crate.
pub fn arrows(sources: &Path) -> BTreeMap<PathBuf, Arrows> {
    let whole = Crate::read(sources);
    let mut found: BTreeMap<PathBuf, Arrows> = BTreeMap::new();
    for source in whole.sources.values() {
        for (path, targets) in named(&whole, source) {
            for target in targets {
                let Some((folder, from, to)) = arrow(&source.module, &target) else { continue };
                let arrow = Arrow { file: source.path.clone(), path: path.join("::") };
                let arrows = found.entry(folder).or_default();
                arrows.entry(from).or_default().entry(to).or_insert(arrow);
            }
        }
    }
    found
}

/// Each path that a file names, and the modules that it uses by naming it.
fn named(whole: &Crate, source: &Source) -> Vec<(Vec<String>, Vec<Module>)> {
    let is_above = |module: &Module| source.module.starts_with(module);
    let is_below = |module: &Module| module.starts_with(&source.module);
    let used = |path: &[String], is_contents: bool| {
        let stops = whole.stops(&source.module, path).into_iter();
        let continues = path.iter().any(|name| source.continued.contains(name));
        let modules = stops.filter_map(|stop| match stop {
            Stop::Item(module) => (!continues).then_some(module),
            Stop::Module(module) | Stop::Passed(module) => (!is_above(&module)).then_some(module),
        });
        modules.filter(|module| !(is_contents && is_below(module))).collect()
    };
    let mut found = Vec::new();
    for taken in &source.uses {
        let is_contents = taken.is_public && !source.words.contains(&taken.name);
        found.push((taken.path.clone(), used(&taken.path, is_contents)));
    }
    found.extend(source.paths.iter().map(|path| (path.clone(), used(path, false))));
    found
}

/// The innermost folder that has both modules, and the entries that they are in.
fn arrow(from: &[String], to: &[String]) -> Option<(PathBuf, String, String)> {
    let common = from.iter().zip(to).take_while(|(from, to)| from == to).count();
    let entry = |module: &[String]| module.get(common).cloned().unwrap_or_else(|| OWN_FILE.to_string());
    (from != to).then(|| (from[..common].iter().collect(), entry(from), entry(to)))
}

/// The circles: sets of entries that all reach each other.
pub fn circles(arrows: &Arrows) -> Vec<BTreeSet<String>> {
    let mut found: Vec<BTreeSet<String>> = Vec::new();
    for entry in arrows.keys().filter(|entry| reached(arrows, entry).contains(*entry)) {
        if found.iter().any(|circle| circle.contains(entry)) {
            continue;
        }
        let around = reached(arrows, entry);
        found.push(around.into_iter().filter(|other| reached(arrows, other).contains(entry)).collect());
    }
    found
}

/// The entries that are reached from one entry by an arrow, or by several in a row.
fn reached(arrows: &Arrows, from: &str) -> BTreeSet<String> {
    let mut seen = BTreeSet::new();
    let mut left = vec![from.to_string()];
    while let Some(entry) = left.pop() {
        for next in arrows.get(&entry).into_iter().flat_map(BTreeMap::keys) {
            if seen.insert(next.clone()) {
                left.push(next.clone());
            }
        }
    }
    seen
}
