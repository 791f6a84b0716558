//! Charts of a job's last steps, and formats of their numbers.

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    text::Line,
    widgets::Sparkline,
};

use super::{
    styles::{good, quiet},
    view::{JobView, StepView},
};

/// Draws four charts of the last steps.
pub(super) fn draw_charts(frame: &mut Frame<'_>, area: Rect, job: &JobView) {
    type Chart = (&'static str, fn(&StepView) -> Option<f64>, fn(f64) -> String);
    let all: [Chart; 4] = [
        ("loss", |step| step.loss, number),
        ("step", |step| step.seconds, seconds),
        ("exposed", |step| step.exposed_seconds, seconds),
        ("norm", norm, number),
    ];
    let [upper, lower] = Layout::vertical([Constraint::Fill(1); 2]).areas(area);
    for (row, charts) in [upper, lower].into_iter().zip(all.chunks(2)) {
        let columns: [Rect; 2] = Layout::horizontal([Constraint::Fill(1); 2]).spacing(2).areas(row);
        for (place, (name, of, show)) in columns.into_iter().zip(charts) {
            let values: Vec<f64> =
                job.steps.iter().filter_map(of).filter(|value| value.is_finite()).collect();
            draw_chart(frame, place, name, &values, *show);
        }
    }
}

/// Draws a line of the last values that fit, with their range.
fn draw_chart(frame: &mut Frame<'_>, area: Rect, name: &str, values: &[f64], show: fn(f64) -> String) {
    let shown = &values[values.len().saturating_sub(area.width as usize)..];
    let (low, high) = shown
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &value| (low.min(value), high.max(value)));
    let title = match shown.last() {
        Some(&last) => format!("{name} {}  ({} to {})", show(last), show(low), show(high)),
        None => format!("{name} -"),
    };
    let [head, chart] = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(area);
    frame.render_widget(Line::styled(title, quiet()), head);
    // Heights begin at 1, so that the lowest value is visible too.
    let range = if high > low { high - low } else { 1.0 };
    let heights: Vec<u64> = shown.iter().map(|value| 1 + ((value - low) / range * 99.0) as u64).collect();
    frame.render_widget(Sparkline::default().data(&heights).max(100).style(good()), chart);
}

/// Returns the norm of a step; None for a skipped step.
pub(super) fn norm(step: &StepView) -> Option<f64> {
    (!step.skipped).then_some(step.norm)
}

pub(super) fn number(value: f64) -> String {
    match value.abs() {
        size if size != 0.0 && !(1e-3..1e6).contains(&size) => format!("{value:.2e}"),
        size if size >= 100.0 => format!("{value:.0}"),
        _ => format!("{value:.3}"),
    }
}

pub(super) fn seconds(value: f64) -> String {
    if value < 1.0 { format!("{:.1} ms", value * 1e3) } else { format!("{value:.2} s") }
}

pub(super) fn speed(value: f64) -> String {
    if value < 1e9 { format!("{:.1} MB/s", value / 1e6) } else { format!("{:.2} GB/s", value / 1e9) }
}
