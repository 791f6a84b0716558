//! Prints measurements case by case, as a Markdown table or as JSON.

use super::Measured;
use crate::output::Output;

const HEAD: [&str; 7] = ["case", "threads", "GB/s", "min..max", "limit GB/s", "of the limit", "ns/param"];
/// Column widths for rows that are not known yet. A wider number makes its row longer.
const ROOM: [usize; 7] = [0, 7, 6, 14, 10, 12, 8];

/// Rows that are printed as they come. The table is Markdown, so that it can be pasted into a page.
pub(super) struct Rows {
    /// None for one JSON object a line.
    widths: Option<[usize; 7]>,
}

impl Rows {
    /// Prints the head of a table. Its first column is wide enough for these names.
    pub(super) fn begin<'a>(cases: impl Iterator<Item = &'a str>, out: Output) -> Rows {
        let rows = Rows { widths: (!out.is_json()).then(|| widths(cases)) };
        if let Some(widths) = &rows.widths {
            say!("{}\n{}", line(&HEAD.map(str::to_string), widths), rules(widths));
        }
        rows
    }

    pub(super) fn say(&self, measured: &Measured) {
        match &self.widths {
            Some(widths) => say!("{}", line(&cells(measured), widths)),
            None => say!("{}", measured.json()),
        }
    }
}

fn widths<'a>(cases: impl Iterator<Item = &'a str>) -> [usize; 7] {
    let mut widths = ROOM;
    for (width, head) in widths.iter_mut().zip(HEAD) {
        *width = head.len().max(*width);
    }
    widths[0] = cases.map(str::len).fold(widths[0], usize::max);
    widths
}

fn cells(case: &Measured) -> [String; 7] {
    [
        case.case.clone(),
        case.threads.to_string(),
        format!("{:.1}", case.gb_per_s()),
        format!("{:.1}..{:.1}", case.min_gb_per_s(), case.max_gb_per_s()),
        format!("{:.1}", case.limit_gb_per_s()),
        format!("{:.2}", case.fraction()),
        format!("{:.3}", case.ns_per_param()),
    ]
}

fn line(cells: &[String; 7], widths: &[usize; 7]) -> String {
    let cells = cells.iter().zip(widths).enumerate().map(|(column, (cell, &width))| match column {
        0 => format!("{cell:<width$}"),
        _ => format!("{cell:>width$}"),
    });
    format!("| {} |", cells.collect::<Vec<_>>().join(" | "))
}

fn rules(widths: &[usize; 7]) -> String {
    let rules = widths.iter().enumerate().map(|(column, &width)| match column {
        0 => "-".repeat(width),
        _ => format!("{}:", "-".repeat(width - 1)),
    });
    format!("| {} |", rules.collect::<Vec<_>>().join(" | "))
}
