//! Plots losses in plain text.

const WIDTH: usize = 64;
const HEIGHT: usize = 12;

/// Returns lines with one column per run of steps, at the mean of its losses. No lines for fewer than two losses.
pub(super) fn plot(losses: &[(u64, f32)]) -> Vec<String> {
    let losses: Vec<(u64, f32)> = losses.iter().copied().filter(|(_, loss)| loss.is_finite()).collect();
    if losses.len() < 2 {
        return Vec::new();
    }
    let columns = losses.len().min(WIDTH);
    let mean = |column: usize| {
        let (from, to) = (column * losses.len() / columns, (column + 1) * losses.len() / columns);
        let sum: f64 = losses[from..to].iter().map(|(_, loss)| f64::from(*loss)).sum();
        sum / (to - from) as f64
    };
    let means: Vec<f64> = (0..columns).map(mean).collect();
    let (low, high) = means
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &value| (low.min(value), high.max(value)));
    let range = if high > low { high - low } else { 1.0 };
    let row_of = |value: f64| ((high - value) / range * (HEIGHT - 1) as f64).round() as usize;
    let mut lines = Vec::with_capacity(HEIGHT + 2);
    for row in 0..HEIGHT {
        let marks: String = means.iter().map(|&value| if row_of(value) == row { '*' } else { ' ' }).collect();
        let level = high - range * row as f64 / (HEIGHT - 1) as f64;
        let label = if row % 4 == 0 || row + 1 == HEIGHT { format!("{level:8.3}") } else { " ".repeat(8) };
        lines.push(format!("{label} |{marks}").trim_end().to_string());
    }
    lines.push(format!("{} +{}", " ".repeat(8), "-".repeat(columns)));
    let (first, last) = (losses[0].0.to_string(), format!("step {}", losses[losses.len() - 1].0));
    let between = columns.saturating_sub(first.len() + last.len()).max(1);
    lines.push(format!("{}{first}{}{last}", " ".repeat(10), " ".repeat(between)));
    lines
}
