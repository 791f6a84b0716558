//! The plot of a run's losses.

use longshore_tests::{command::run, train::Train};

#[test]
fn a_plot_is_printed_where_it_is_asked_for() {
    let plain = run("longshore train", &mut Train::new(8).command());
    assert!(!plain.stdout.contains("loss of each step"), "{plain:?}");
    let plotted = run("longshore train", Train::new(8).command().arg("--plot"));
    let lines: Vec<&str> = plotted.stdout.lines().skip_while(|line| *line != "loss of each step").collect();
    assert!(lines.len() > 14 && lines[1].contains("|*") && lines[14].ends_with("step 8"), "{lines:#?}");
}
