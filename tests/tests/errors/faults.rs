//! Collects every fault in the sources: from `Fault::new`, `Fault::invalid`, and helpers that fill in some of
//! the fields.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use longshore_proto::FaultKind;
use syn::{
    Expr, ExprCall, ExprMethodCall, FnArg, ItemConst, Local, Pat, Signature,
    visit::{self, Visit},
};

use super::{
    ROOMS, root, sources,
    text::{self, Names},
};

/// A fault, with `{name}` for each value known only at run time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Made {
    pub(crate) field: String,
    pub(crate) kind: String,
    pub(crate) value: String,
    pub(crate) limit: String,
    pub(crate) remedy: String,
    pub(crate) by: &'static str,
}

/// A function that makes a fault from its arguments.
#[derive(Clone)]
struct Helper {
    parameters: Vec<String>,
    parts: [Expr; 4],
    kind: Option<Expr>,
    names: Names,
}

pub(crate) fn all() -> Vec<Made> {
    let mut all = Vec::new();
    for (folder, by) in ROOMS {
        let files = sources(&root().join(folder));
        let constants = Constants::of(&files);
        // Helpers are keyed by name and folder, so that equal names of other modules stay apart.
        let mut helpers = HashMap::new();
        for (path, file) in &files {
            let mut find = Scan::new(path, by, constants.seen_from(path));
            find.visit_file(file);
            helpers.extend(find.found_helpers);
        }
        for (path, file) in &files {
            let mut scan = Scan::new(path, by, constants.seen_from(path));
            scan.helpers = helpers.clone();
            scan.visit_file(file);
            all.extend(scan.made);
        }
    }
    all.sort();
    all.dedup();
    all
}

/// Text constants, by the file that defines them.
struct Constants(Vec<(PathBuf, Names)>);

impl Constants {
    fn of(files: &[(PathBuf, syn::File)]) -> Constants {
        let of_file = |(path, file): &(PathBuf, syn::File)| {
            let mut texts = Texts(Names::new());
            texts.visit_file(file);
            (path.clone(), texts.0)
        };
        Constants(files.iter().map(of_file).collect())
    }

    /// Several files may define one name. The file that shares the most folders with `path` wins.
    fn seen_from(&self, path: &Path) -> Names {
        let shared =
            |other: &Path| path.components().zip(other.components()).take_while(|(a, b)| a == b).count();
        let mut files: Vec<&(PathBuf, Names)> = self.0.iter().collect();
        files.sort_by_key(|(other, _)| shared(other));
        files.into_iter().flat_map(|(_, names)| names.clone()).collect()
    }
}

struct Texts(Names);

impl Visit<'_> for Texts {
    fn visit_item_const(&mut self, item: &ItemConst) {
        let value = text::of(&item.expr, &Names::new());
        if !value.starts_with('{') {
            self.0.insert(item.ident.to_string(), value);
        }
    }
}

struct Scan {
    folder: String,
    by: &'static str,
    constants: Names,
    names: Names,
    parameters: Vec<String>,
    function: String,
    helpers: HashMap<(String, String), Helper>,
    found_helpers: HashMap<(String, String), Helper>,
    made: Vec<Made>,
}

impl Scan {
    fn new(path: &Path, by: &'static str, constants: Names) -> Scan {
        let folder = path.parent().expect("a folder").display().to_string();
        Scan {
            folder,
            by,
            names: constants.clone(),
            constants,
            parameters: Vec::new(),
            function: String::new(),
            helpers: HashMap::new(),
            found_helpers: HashMap::new(),
            made: Vec::new(),
        }
    }

    fn enter(&mut self, signature: &Signature, inside: impl FnOnce(&mut Self)) {
        let outer =
            (self.names.clone(), std::mem::take(&mut self.parameters), std::mem::take(&mut self.function));
        self.names = self.constants.clone();
        self.function = signature.ident.to_string();
        for input in &signature.inputs {
            if let FnArg::Typed(typed) = input
                && let Pat::Ident(name) = &*typed.pat
            {
                self.names.remove(&name.ident.to_string());
                self.parameters.push(name.ident.to_string());
            }
        }
        inside(self);
        (self.names, self.parameters, self.function) = outer;
    }

    /// Returns the kind's name, from a path `FaultKind::Invalid`, an imported name, or a helper's argument.
    fn kind(&self, expr: &Expr) -> Option<String> {
        let Expr::Path(path) = expr else { return None };
        let last = path.path.segments.last()?.ident.to_string();
        let kind = FaultKind::ALL.iter().find(|kind| format!("{kind:?}") == last);
        kind.map(|kind| kind.name().to_string())
    }

    fn push(&mut self, kind: Option<String>, parts: &[Expr; 4], names: &Names) {
        let [field, value, limit, remedy] = parts.each_ref().map(|part| text::of(part, names));
        let kind = kind.unwrap_or_else(|| "any".to_string());
        self.made.push(Made { field, kind, value, limit, remedy, by: self.by });
    }

    fn fault(&mut self, kind: Option<Expr>, parts: [Expr; 4]) {
        let is_given = |expr: &Expr, parameters: &[String]| match expr {
            Expr::Path(path) => {
                path.path.get_ident().is_some_and(|name| parameters.contains(&name.to_string()))
            }
            _ => false,
        };
        let given = parts.iter().chain(&kind).any(|part| is_given(part, &self.parameters));
        if given && !self.function.is_empty() {
            let helper = Helper {
                parameters: self.parameters.clone(),
                parts: parts.clone(),
                kind: kind.clone(),
                names: self.names.clone(),
            };
            let key = (self.folder.clone(), self.function.clone());
            // The fields of a helper are recorded at its calls.
            if self.helpers.contains_key(&key) {
                return;
            }
            self.found_helpers.insert(key, helper);
        }
        let kind = match &kind {
            Some(kind) => self.kind(kind),
            None => Some(FaultKind::Invalid.name().to_string()),
        };
        self.push(kind, &parts, &self.names.clone());
    }

    /// Looks for a helper beside the caller, and then in the folders above.
    fn helper(&self, name: &str) -> Option<Helper> {
        let mut folder = Path::new(&self.folder);
        loop {
            if let Some(helper) = self.helpers.get(&(folder.display().to_string(), name.to_string())) {
                return Some(helper.clone());
            }
            folder = folder.parent()?;
        }
    }

    fn by_helper(&mut self, name: &str, arguments: Vec<Expr>) {
        let Some(helper) = self.helper(name) else { return };
        if helper.parameters.len() != arguments.len() || self.function == name {
            return;
        }
        let mut names = helper.names.clone();
        let mut kind = helper.kind.as_ref().map_or(Some("INVALID".to_string()), |kind| self.kind(kind));
        for (parameter, argument) in helper.parameters.iter().zip(&arguments) {
            names.insert(parameter.clone(), text::of(argument, &self.names));
            let is_kind = matches!(&helper.kind, Some(Expr::Path(path)) if path.path.is_ident(parameter));
            if is_kind {
                kind = self.kind(argument);
            }
        }
        self.push(kind, &helper.parts, &names);
    }
}

impl<'ast> Visit<'ast> for Scan {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        if module.ident != "tests" && module.ident != "models" {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.enter(&item.sig, |scan| visit::visit_item_fn(scan, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.enter(&item.sig, |scan| visit::visit_impl_item_fn(scan, item));
    }

    fn visit_local(&mut self, local: &'ast Local) {
        visit::visit_local(self, local);
        if let (Pat::Ident(name), Some(init)) = (&local.pat, &local.init) {
            let value = text::of(&init.expr, &self.names);
            if !value.is_empty() && !value.starts_with('{') {
                self.names.insert(name.ident.to_string(), value);
            }
        }
    }

    fn visit_expr_call(&mut self, call: &'ast ExprCall) {
        visit::visit_expr_call(self, call);
        let Expr::Path(path) = &*call.func else { return };
        let segments: Vec<String> =
            path.path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        let arguments: Vec<Expr> = call.args.iter().cloned().collect();
        match (segments.iter().map(String::as_str).collect::<Vec<_>>().as_slice(), arguments.as_slice()) {
            ([.., "Fault", "new"], [kind, field, value, limit, remedy]) => {
                self.fault(Some(kind.clone()), [field, value, limit, remedy].map(Clone::clone));
            }
            ([.., "Fault", "invalid"], [field, value, limit, remedy]) => {
                self.fault(None, [field, value, limit, remedy].map(Clone::clone));
            }
            ([.., name], _) => self.by_helper(name, arguments),
            ([], _) => {}
        }
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        visit::visit_expr_method_call(self, call);
        if matches!(&*call.receiver, Expr::Path(path) if path.path.is_ident("self")) {
            self.by_helper(&call.method.to_string(), call.args.iter().cloned().collect());
        }
    }
}
