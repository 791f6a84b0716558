//! Checks the Prometheus and Grafana files against servers' metrics, with Prometheus' own promtool.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use longshore_tests::{
    command::{Output, run},
    http::{self, FLAGS},
    server::ServerOptions,
    skip,
    train::Train,
};
use serde_json::Value;
use tempfile::TempDir;

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

/// Returns whether Debian's package `prometheus` is installed. Reports the test as skipped otherwise.
#[track_caller]
fn has_promtool() -> bool {
    let has = Command::new("promtool").arg("--version").output().is_ok();
    if !has {
        skip::skipped("there is no promtool: install Debian's package prometheus");
    }
    has
}

fn promtool(arguments: &[&str]) -> Output {
    run("promtool", Command::new("promtool").args(arguments).current_dir(deploy().join("prometheus")))
}

/// Returns the names in `text` with the prefix of servers' metrics.
fn names(text: &str) -> BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let words = text.split(|c| !is_name(c)).filter(|word| word.starts_with("longshore_"));
    words.map(str::to_string).collect()
}

#[test]
fn alerts_and_dashboard_name_metrics_that_there_are() {
    let server = ServerOptions::new().args(FLAGS).start();
    let (_, _, text) = http::get(&http::address(&server), "/metrics");
    let mut known = BTreeSet::new();
    for family in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = family.split_once(' ').unwrap();
        match kind {
            "histogram" => known.extend(["bucket", "count", "sum"].map(|end| format!("{name}_{end}"))),
            _ => known.extend([name.to_string()]),
        }
    }
    for file in ["prometheus/alerts.yml", "prometheus/alerts_test.yml", "grafana/longshore.json"] {
        let used = names(&fs::read_to_string(deploy().join(file)).unwrap());
        assert!(used.len() > 5, "{file}: {used:?}");
        let unknown: Vec<_> = used.difference(&known).collect();
        assert!(unknown.is_empty(), "{file} names what no server says: {unknown:?}");
    }
    let dashboard = fs::read_to_string(deploy().join("grafana/longshore.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    assert!(dashboard["panels"].as_array().unwrap().len() > 10);
}

#[test]
fn alerts_fire_as_promtool_finds() {
    if !has_promtool() {
        return;
    }
    for arguments in [
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
        ["check", "config", "prometheus.yml"],
    ] {
        let output = promtool(&arguments);
        assert_eq!(output.code, 0, "{output:?}");
    }
    let root = TempDir::new().unwrap();
    let checkpoints = root.path().join("checkpoints");
    fs::create_dir(&checkpoints).unwrap();
    let server = ServerOptions::new().args(FLAGS).checkpoint_dir(&checkpoints).start();
    Train::new(3).servers(&[server.address().to_string()]).args(["--checkpoint-every", "3"]).run();
    let (_, _, text) = http::get(&http::address(&server), "/metrics");
    let file = root.path().join("metrics");
    fs::write(&file, text).unwrap();
    let mut check = Command::new("promtool");
    check.args(["check", "metrics"]).stdin(fs::File::open(&file).unwrap());
    let checked = run("promtool check metrics", &mut check);
    assert_eq!((checked.code, checked.stderr.as_str()), (0, ""), "{checked:?}");
}

/// Collects every expression of a dashboard, at any depth.
fn expressions(of: &Value, found: &mut Vec<String>) {
    match of {
        Value::Array(all) => all.iter().for_each(|one| expressions(one, found)),
        Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str() {
                    Some(expression) if name == "expr" => found.push(expression.to_string()),
                    _ => expressions(value, found),
                }
            }
        }
        _ => {}
    }
}

/// Runs promtool on a rules file with each expression as a rule.
fn checked(expressions: &[String]) -> Output {
    let rule = |(index, expression): (usize, &String)| serde_json::json!({"record": format!("panel:{index}"), "expr": expression});
    let rules: Vec<Value> = expressions.iter().enumerate().map(rule).collect();
    let folder = TempDir::new().unwrap();
    // promtool reads YAML, and JSON is valid YAML.
    let file = folder.path().join("rules.yml");
    fs::write(&file, serde_json::json!({"groups": [{"name": "dashboard", "rules": rules}]}).to_string())
        .unwrap();
    promtool(&["check", "rules", &file.display().to_string()])
}

#[test]
fn every_expression_of_the_dashboard_parses() {
    if !has_promtool() {
        return;
    }
    let dashboard = fs::read_to_string(deploy().join("grafana/longshore.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let mut found = Vec::new();
    expressions(&dashboard["panels"], &mut found);
    assert!(found.len() > 20, "{found:?}");
    // Grafana substitutes each variable, and a variable may stand only inside a string.
    let variables = dashboard["templating"]["list"].as_array().unwrap().iter();
    let variables: Vec<String> =
        variables.filter_map(|one| Some(format!("${}", one["name"].as_str()?))).collect();
    for expression in &mut found {
        for variable in &variables {
            *expression = expression.replace(&format!("=~\"{variable}\""), "=~\".*\"");
        }
        assert!(!expression.contains('$'), "a variable that the dashboard does not have: {expression}");
    }
    let output = checked(&found);
    assert_eq!(output.code, 0, "{output:?}");
    assert!(output.stdout.contains(&format!("{} rules found", found.len())), "{output:?}");
    // The check itself works: promtool refuses an expression with a missing bracket.
    found[3].pop();
    assert_ne!(checked(&found).code, 0);
}
