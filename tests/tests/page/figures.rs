//! The page's charts match `longshore status`.

use longshore_tests::{
    browser::Browser,
    command::{done, longshore},
    http::{self, FLAGS},
    server::ServerOptions,
    train::Train,
};
use serde_json::Value;

use super::{browser, open};

const STEPS: u64 = 20;

/// A chart's title, its field in status, and the page's function that formats it.
const CHARTS: [(&str, &str, &str); 9] = [
    ("loss", "loss", "number"),
    ("step time", "seconds", "seconds"),
    ("exposed time", "exposed_seconds", "seconds"),
    ("gradient norm", "norm", "number"),
    ("loss scale", "loss_scale", "number"),
    ("learning rate", "learning_rate", "number"),
    ("pushes", "pushed_per_s", "speed"),
    ("pulls", "pulled_per_s", "speed"),
    ("updates", "update_per_s", "speed"),
];

/// Returns one chart's values in status, with their steps.
fn told(steps: &[Value], field: &str) -> Vec<(u64, f64)> {
    steps.iter().filter_map(|step| Some((step["step"].as_u64()?, step[field].as_f64()?))).collect()
}

/// Returns a chart's points, as fractions of its width and of its height from the highest point down.
fn drawn(browser: &mut Browser, title: &str) -> Vec<(f64, f64)> {
    let path = format!("{}.querySelector('path').getAttribute('d')", figure(title));
    let path = browser.eval(&path).as_str().unwrap_or_else(|| panic!("no line of {title}")).to_string();
    let points = path.split(['M', 'L']).skip(1);
    let point = |text: &str| {
        let (x, y) = text.split_once(' ').expect("two numbers");
        (x.parse::<f64>().unwrap() / 300.0, (y.parse::<f64>().unwrap() - 4.0) / 82.0)
    };
    points.map(point).collect()
}

/// Returns the page's expression for the figure of this title.
fn figure(title: &str) -> String {
    format!(
        "[...document.querySelectorAll('figure')].find((one) => one.querySelector('h3').textContent === '{title}')"
    )
}

#[test]
fn charts_show_the_steps_that_status_tells() {
    let Some(mut browser) = browser() else { return };
    let server = ServerOptions::new().args(FLAGS).start();
    // With two ranks an update reads a sum in fp32, so its speed differs from a single rank's.
    let pair = ["--transport", "tcp", "--world-size", "2"];
    Train::new(STEPS).args(pair).servers(&[server.address().to_string()]).run();
    open(&mut browser, &http::address(&server));
    browser.until("the job's charts", "document.querySelectorAll('svg path').length === 9");
    let asked = ["status", "--output", "json", "--steps", "512", "--servers", server.address()];
    let status = done(asked);
    let status: Value = serde_json::from_str(&status.stdout).unwrap();
    let steps = status["servers"][0]["steps"].as_array().expect("steps");
    assert_eq!(steps.len() as u64, STEPS);

    for (title, field, show) in CHARTS {
        let told = told(steps, field);
        // The first step has no predecessor to count from. The second may be decided before an update has
        // ended.
        assert!(told.len() as u64 >= STEPS - 2, "{title}: {told:?}");
        let values = told.iter().map(|(_, value)| *value);
        let (low, high) = (values.clone().fold(f64::MAX, f64::min), values.fold(f64::MIN, f64::max));
        let mut shown =
            |value: f64| browser.eval(&format!("{show}({value:?})")).as_str().unwrap().to_string();
        let [last, low_shown, high_shown] = [told[told.len() - 1].1, low, high].map(&mut shown);
        let texts = browser
            .eval(&format!("[...{}.querySelectorAll('span')].map((one) => one.textContent)", figure(title)));
        let range = if low == high { low_shown } else { format!("{low_shown} to {high_shown}") };
        let [first, newest] = [told[0].0, told[told.len() - 1].0];
        assert_eq!(texts, serde_json::json!([last, range, format!("steps {first} to {newest}")]), "{title}");

        let drawn = drawn(&mut browser, title);
        assert_eq!(drawn.len(), told.len(), "{title}");
        for ((x, y), (step, value)) in drawn.into_iter().zip(&told) {
            let across = (step - first) as f64 / (newest - first) as f64;
            let down = if low == high { 0.5 } else { (high - value) / (high - low) };
            assert!(
                (x - across).abs() < 2e-3 && (y - down).abs() < 2e-3,
                "{title}, step {step}: {x}, {y}; {across}, {down}"
            );
        }
    }
    let text = browser.text();
    let servers = &status["servers"][0];
    let applied = format!("{}, {} applied", servers["version"], servers["applied"]);
    assert!(text.contains(&applied), "no {applied} in {text}");
}

#[test]
fn steps_are_for_programs() {
    let refused = longshore(["status", "--steps", "5", "--servers", "127.0.0.1:1"]);
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(refused.stderr.contains("--output json"), "{refused:?}");
}
