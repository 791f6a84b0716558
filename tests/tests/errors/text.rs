//! Evaluates an expression of a source to its text, with `{name}` for each value known only at run time.

use std::collections::HashMap;

use syn::{Expr, Lit, Stmt, Token, punctuated::Punctuated};

/// The values of names: constants, variables of the function, and a helper's parameters.
pub(crate) type Names = HashMap<String, String>;

/// Returns the text of an expression, with unknown values named.
pub(crate) fn of(expr: &Expr, names: &Names) -> String {
    match expr {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Str(text) => text.value(),
            Lit::Int(number) => number.base10_digits().to_string(),
            Lit::Float(number) => number.base10_digits().to_string(),
            Lit::Bool(value) => value.value.to_string(),
            _ => "{…}".to_string(),
        },
        Expr::Path(path) => {
            let name = path.path.segments.last().map(|segment| segment.ident.to_string());
            let name = name.unwrap_or_default();
            names.get(&name).cloned().unwrap_or_else(|| format!("{{{}}}", name.to_lowercase()))
        }
        Expr::Reference(inner) => of(&inner.expr, names),
        Expr::Paren(inner) => of(&inner.expr, names),
        Expr::Unary(inner) => of(&inner.expr, names),
        Expr::Cast(inner) => of(&inner.expr, names),
        Expr::Try(inner) => of(&inner.expr, names),
        Expr::Block(inner) => last(&inner.block.stmts, names),
        Expr::Index(inner) => of(&inner.expr, names),
        Expr::Field(field) => match &field.member {
            syn::Member::Named(name) => format!("{{{name}}}"),
            syn::Member::Unnamed(_) => of(&field.base, names),
        },
        Expr::Macro(made) if made.mac.path.is_ident("format") => {
            let parse = Punctuated::<Expr, Token![,]>::parse_terminated;
            let parts = made.mac.parse_body_with(parse).expect("the arguments of a format");
            format(&parts.into_iter().collect::<Vec<_>>(), names)
        }
        Expr::MethodCall(call) => method(call, names),
        Expr::If(choice) => {
            let no = choice.else_branch.as_ref().map(|(_, no)| of(no, names)).unwrap_or_default();
            either([last(&choice.then_branch.stmts, names), no])
        }
        Expr::Match(choice) => either(choice.arms.iter().map(|arm| of(&arm.body, names))),
        Expr::Call(call) => match (&*call.func, call.args.first()) {
            (Expr::Path(path), Some(first)) if ends_with(path, &["from", "Some"]) => of(first, names),
            (function, _) => of(function, names),
        },
        _ => "{…}".to_string(),
    }
}

fn ends_with(path: &syn::ExprPath, names: &[&str]) -> bool {
    path.path.segments.last().is_some_and(|last| names.iter().any(|name| last.ident == name))
}

fn method(call: &syn::ExprMethodCall, names: &Names) -> String {
    match call.method.to_string().as_str() {
        "to_string" | "into" | "clone" | "to_owned" | "as_str" | "display" | "unwrap_or_default"
        | "as_ref" | "get" => of(&call.receiver, names),
        "join" | "collect" | "map" | "iter" | "take" | "len" | "name" => of(&call.receiver, names),
        name => format!("{{{name}}}"),
    }
}

fn last(statements: &[Stmt], names: &Names) -> String {
    match statements.last() {
        Some(Stmt::Expr(expr, _)) => of(expr, names),
        _ => String::new(),
    }
}

/// Returns the text of one of several branches.
fn either(branches: impl IntoIterator<Item = String>) -> String {
    let mut said: Vec<String> = Vec::new();
    for branch in branches {
        if !branch.is_empty() && !said.contains(&branch) {
            said.push(branch);
        }
    }
    said.join(" / ")
}

/// Returns a format string with its values named in place.
fn format(parts: &[Expr], names: &Names) -> String {
    let Some((text, values)) = parts.split_first() else { return String::new() };
    let mut known = names.clone();
    let mut positional = Vec::new();
    for value in values {
        match value {
            Expr::Assign(assign) => {
                if let Expr::Path(path) = &*assign.left
                    && let Some(name) = path.path.get_ident()
                {
                    known.insert(name.to_string(), of(&assign.right, names));
                }
            }
            value => positional.push(of(value, names)),
        }
    }
    fill(&of(text, names), &positional, &known)
}

/// Fills the known values into a format string.
pub(crate) fn fill(text: &str, positional: &[String], names: &Names) -> String {
    let mut made = String::new();
    let (mut next, mut chars) = (0, text.chars().peekable());
    while let Some(char) = chars.next() {
        if (char == '{' || char == '}') && chars.peek() == Some(&char) {
            chars.next();
            made.push(char);
        } else if char == '{' {
            let inside: String = chars.by_ref().take_while(|&char| char != '}').collect();
            let name = inside.split(':').next().unwrap_or_default();
            if name.is_empty() {
                made.push_str(positional.get(next).map_or("{…}", |value| value));
                next += 1;
            } else if let Some(value) = name.parse().ok().and_then(|at: usize| positional.get(at)) {
                made.push_str(value);
            } else {
                made.push_str(&names.get(name).cloned().unwrap_or_else(|| format!("{{{name}}}")));
            }
        } else {
            made.push(char);
        }
    }
    made
}
