//! Finds the module that defines an item, whichever modules of its crate pass its name on.

use std::{collections::BTreeMap, path::Path};

use super::source::{Source, sources};

/// A module's path in its crate.
pub(super) type Module = Vec<String>;

/// The modules of a crate that have files of their own.
pub(super) struct Crate {
    pub(super) sources: BTreeMap<Module, Source>,
}

/// A module that a path leads to or through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The path names the module itself.
    Module(Module),
    /// The module defines what the path names.
    Item(Module),
    /// The module passes on what another one defines.
    Passed(Module),
}

/// How a path is followed.
#[derive(Clone, Copy)]
struct Way {
    /// How many more times a name may be passed on, so that the search for a name that leads to itself ends.
    left: u32,
    /// Whether the path leads into the crate for certain. If so, an item that no file is seen to define was made by a
    /// macro.
    certain: bool,
    /// Whether this is still the file that the path stands in. Only there a `use` inside a function counts.
    inside: bool,
}

impl Crate {
    pub(super) fn read(folder: &Path) -> Self {
        Self { sources: sources(folder).into_iter().map(|source| (source.module.clone(), source)).collect() }
    }

    /// The modules that `path` leads through and to if it stands in `module`. There are none if it leads out of the
    /// crate.
    pub(super) fn stops(&self, module: &[String], path: &[String]) -> Vec<Stop> {
        let mut stops = Vec::new();
        self.follow(module, path, Way { left: 8, certain: true, inside: true }, &mut stops);
        stops
    }

    fn follow(&self, module: &[String], path: &[String], way: Way, stops: &mut Vec<Stop>) -> bool {
        let mut base = module.to_vec();
        let ups = path.iter().take_while(|name| ["crate", "self", "super"].contains(&name.as_str())).count();
        for name in &path[..ups] {
            match name.as_str() {
                "crate" => base.clear(),
                "super" => drop(base.pop()),
                _ => {}
            }
        }
        let way = Way { certain: way.certain && ups > 0, ..way };
        self.walk(base, &path[ups..], way, stops)
    }

    /// Follows `names` from the module `at` on. Returns whether they lead anywhere in the crate.
    fn walk(&self, at: Module, names: &[String], way: Way, stops: &mut Vec<Stop>) -> bool {
        let Some((name, rest)) = names.split_first() else {
            stops.push(Stop::Module(at));
            return true;
        };
        let (mut found, mut is_passed) = (false, false);
        let child = [&at[..], std::slice::from_ref(name)].concat();
        let is_module = self.sources.keys().any(|known| known.starts_with(&child));
        // A function may have the name of a module, and only the module has names below it.
        if is_module && !rest.is_empty() {
            return self.walk(child, rest, Way { certain: true, inside: false, ..way }, stops);
        }
        if let Some(source) = self.sources.get(&at) {
            if source.items.contains(name) {
                stops.push(Stop::Item(at.clone()));
                found = true;
            }
            let seen = source.uses.iter().filter(|taken| way.left > 0 && (way.inside || taken.outer));
            // A `use` of one name alone would lead to itself.
            for taken in seen.filter(|taken| taken.name == *name && taken.path.len() > 1) {
                let path = [&taken.path[..], rest].concat();
                let further = Way { left: way.left - 1, certain: true, inside: false };
                let before = stops.len();
                is_passed = true;
                if self.follow(&at, &path, further, stops) {
                    stops.insert(before, Stop::Passed(at.clone()));
                    found = true;
                }
            }
        }
        if !found && is_module {
            stops.push(Stop::Module(child));
            return true;
        }
        // A name that a module takes from another crate leads out of this one.
        if !found && !is_passed && way.certain && self.sources.contains_key(&at) {
            stops.push(Stop::Item(at));
            return true;
        }
        found
    }
}
