//! `longshore doctor`: checks the needs of Longshore on a host and its servers, and names missing ones.

use anyhow::ensure;
use serde_json::json;

use crate::{
    doctor::{Finding, Grade, Look},
    output::Output,
};

pub(super) fn run(look: &Look, out: Output) -> anyhow::Result<()> {
    let findings = look.findings()?;
    for Finding { what, grade, said, remedy } in &findings {
        out.result(
            || json!({"check": what, "state": grade.name(), "said": said, "remedy": remedy}),
            || {
                let remedy = if remedy.is_empty() { String::new() } else { format!(". Remedy: {remedy}") };
                format!("{:<8} {what}: {said}{remedy}", grade.name())
            },
        );
    }
    let bad = findings.iter().filter(|found| found.grade == Grade::Bad).map(|found| found.what.as_str());
    let bad: Vec<&str> = bad.collect();
    ensure!(bad.is_empty(), "not in order: {}", bad.join(", "));
    Ok(())
}
