//! Prints what was measured, as a table for people or as JSON for programs.

use super::Measured;

/// Prints a table, or one JSON object a line.
pub(crate) fn print(measured: &[Measured], json: bool) {
    if json {
        for case in measured {
            say!("{}", case.json());
        }
    } else {
        say!("{}", table(measured).trim_end());
    }
}

/// The table is Markdown, so that it can be pasted into a page as it is.
fn table(measured: &[Measured]) -> String {
    let head = ["case", "threads", "GB/s", "min..max", "limit GB/s", "of the limit", "ns/param"];
    let mut rows = vec![head.map(str::to_string)];
    rows.extend(measured.iter().map(|case| {
        [
            case.case.clone(),
            case.threads.to_string(),
            format!("{:.1}", case.gb_per_s()),
            format!("{:.1}..{:.1}", case.min_gb_per_s(), case.max_gb_per_s()),
            format!("{:.1}", case.limit_gb_per_s()),
            format!("{:.2}", case.fraction()),
            format!("{:.3}", case.ns_per_param()),
        ]
    }));
    let widths: Vec<usize> =
        (0..head.len()).map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0)).collect();
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        text += &format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "));
        if index == 0 {
            let rules = widths.iter().enumerate().map(|(column, &width)| match column {
                0 => "-".repeat(width),
                _ => format!("{}:", "-".repeat(width - 1)),
            });
            text += &format!("| {} |\n", rules.collect::<Vec<_>>().join(" | "));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_lines_up() {
        let measured = |case: &str| Measured {
            bench: "update",
            case: case.to_string(),
            threads: 2,
            bytes: 28_000_000_000,
            params: 1_000_000_000,
            times: vec![0.5],
            limits: vec![0.48],
        };
        let text = table(&[measured("adamw/bf16/avx512"), measured("x")]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        assert!(
            lines[2].contains(" 56.0 | 56.0..56.0 ") && lines[2].ends_with(" 0.96 |    0.500 |"),
            "{text}"
        );
    }
}
