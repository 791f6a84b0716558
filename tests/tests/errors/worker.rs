//! The errors of the worker's library, and the Python exception for each.

use std::fs;

use syn::{
    Attribute, Expr, Fields, Item, Lit, Meta, Pat,
    visit::{self, Visit},
};

use super::{
    root, sources,
    text::{self, Names},
};

pub(crate) struct Error {
    pub(crate) name: String,
    pub(crate) what: String,
    pub(crate) says: String,
    pub(crate) fields: Vec<String>,
    pub(crate) exception: String,
}

pub(crate) fn all() -> Vec<Error> {
    let mut all = Vec::new();
    for (_, file) in sources(&root().join("worker/src/error")) {
        for item in &file.items {
            match item {
                Item::Struct(item) => {
                    if let Some(says) = message(&item.attrs) {
                        all.push(error(item.ident.to_string(), says, &item.attrs, &item.fields));
                    }
                }
                // The library's `Error` only forwards the text of each variant.
                Item::Enum(item) if item.ident != "Error" => {
                    for variant in &item.variants {
                        if let Some(says) = message(&variant.attrs) {
                            let name = format!("{}::{}", item.ident, variant.ident);
                            all.push(error(name, says, &variant.attrs, &variant.fields));
                        }
                    }
                }
                _ => {}
            }
        }
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    let exceptions = exceptions();
    for error in &mut all {
        let found = exceptions.iter().find(|(name, _)| *name == error.name);
        let kind = error.name.split("::").next().unwrap_or_default().to_string();
        let short = kind.strip_suffix("Error").unwrap_or(&kind).to_string();
        let found = found.or_else(|| exceptions.iter().find(|(name, _)| *name == kind || *name == short));
        error.exception = found.map(|(_, exception)| exception.clone()).unwrap_or_default();
    }
    all
}

fn error(name: String, says: String, attributes: &[Attribute], fields: &Fields) -> Error {
    let fields = fields.iter().filter_map(|field| Some(field.ident.as_ref()?.to_string())).collect();
    Error { name, what: doc(attributes), says, fields, exception: String::new() }
}

/// Returns the text of `#[error("...")]`, with its values named.
fn message(attributes: &[Attribute]) -> Option<String> {
    let found = attributes.iter().find(|attribute| attribute.path().is_ident("error"))?;
    let Meta::List(list) = &found.meta else { return None };
    let parts = list
        .parse_args_with(|input: syn::parse::ParseStream<'_>| {
            let text: syn::LitStr = input.parse()?;
            let rest: proc_macro2::TokenStream = input.parse()?;
            Ok((text.value(), rest.to_string()))
        })
        .ok()?;
    let positional: Vec<String> =
        parts.1.split(',').skip(1).map(|part| format!("{{{}}}", named(part))).collect();
    Some(text::fill(&parts.0, &positional, &Names::new()))
}

/// Returns the name of the value in an argument such as `.fault.kind.name()`.
fn named(argument: &str) -> String {
    let word = argument.split(|char: char| !char.is_alphanumeric() && char != '_').find(|word| {
        !word.is_empty() && word.chars().next().is_some_and(|first| first.is_lowercase()) && *word != "at"
    });
    word.unwrap_or("detail").to_string()
}

/// Returns the first paragraph of a documentation comment.
pub(crate) fn doc(attributes: &[Attribute]) -> String {
    let lines =
        attributes.iter().filter(|attribute| attribute.path().is_ident("doc")).filter_map(|attribute| {
            let Meta::NameValue(pair) = &attribute.meta else { return None };
            let Expr::Lit(literal) = &pair.value else { return None };
            let Lit::Str(line) = &literal.lit else { return None };
            Some(line.value().trim().to_string())
        });
    lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Reads the binding's function `class`: each variant, and its exception.
fn exceptions() -> Vec<(String, String)> {
    struct Arms(Vec<(String, String)>);
    impl Visit<'_> for Arms {
        fn visit_item_fn(&mut self, item: &syn::ItemFn) {
            if item.sig.ident == "class" {
                visit::visit_item_fn(self, item);
            }
        }
        fn visit_arm(&mut self, arm: &syn::Arm) {
            let class = text::of(&arm.body, &Names::new());
            names(&arm.pat, &mut |name| self.0.push((name, class.clone())));
        }
    }
    let source = fs::read_to_string(root().join("worker/python/src/error.rs")).expect("the binding's errors");
    let mut arms = Arms(Vec::new());
    arms.visit_file(&syn::parse_file(&source).expect("a source that compiles"));
    let inner = inner_names();
    for (variant, _) in &mut arms.0 {
        if let Some((_, inner)) = inner.iter().find(|(name, _)| name == variant) {
            variant.clone_from(inner);
        }
    }
    arms.0
}

/// Calls `found` with each variant that a pattern matches, such as `GradientError::Missing` for a nested
/// pattern.
fn names(pattern: &Pat, found: &mut impl FnMut(String)) {
    match pattern {
        Pat::Or(or) => or.cases.iter().for_each(|case| names(case, found)),
        Pat::TupleStruct(outer) => match outer.elems.first() {
            Some(Pat::Struct(inner)) => {
                let path: Vec<String> =
                    inner.path.segments.iter().map(|segment| segment.ident.to_string()).collect();
                found(path.join("::"));
            }
            _ => found(outer.path.segments.last().map(|last| last.ident.to_string()).unwrap_or_default()),
        },
        _ => {}
    }
}

/// Returns the variants of the library's `Error`, and the type in each.
fn inner_names() -> Vec<(String, String)> {
    let source = fs::read_to_string(root().join("worker/src/error/mod.rs")).expect("the library's errors");
    let file = syn::parse_file(&source).expect("a source that compiles");
    let mut found = Vec::new();
    for item in &file.items {
        let Item::Enum(item) = item else { continue };
        for variant in item.variants.iter().filter(|_| item.ident == "Error") {
            let Some(field) = variant.fields.iter().next() else { continue };
            let syn::Type::Path(path) = &field.ty else { continue };
            let Some(mut last) = path.path.segments.last() else { continue };
            if let syn::PathArguments::AngleBracketed(arguments) = &last.arguments
                && let Some(syn::GenericArgument::Type(syn::Type::Path(inner))) = arguments.args.first()
                && let Some(inner) = inner.path.segments.last()
            {
                last = inner;
            }
            found.push((variant.ident.to_string(), last.ident.to_string()));
        }
    }
    found
}
