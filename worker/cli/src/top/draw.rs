//! Draws a view as lines. A terminal of 80x24 shows everything; more room shows more servers, ranks and taller charts.

use console::{Alignment, Style, measure_text_width, pad_str, truncate_str};
use longshore_proto::legible;

use super::view::{JobView, MovesView, Part, RankView, ServerView, State, StepView, Trouble, View};
use crate::sizes::human;

const BAR: usize = 16;
const RANKS: usize = 37;
/// The most servers shown in little room.
const SERVERS: usize = 4;
/// Cells of a chart, by eighths of their height.
const CELLS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const KEYS: [&str; 6] = [
    "keys",
    "q, Esc, Ctrl-C   end",
    "Tab, Right       next job",
    "Left             job before",
    "Up, Down         scroll the ranks",
    "?                this help",
];

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Chosen {
    pub(super) job: usize,
    pub(super) scrolled: usize,
    /// True if the keys are shown in place of the job.
    pub(super) help: bool,
}

/// Returns a frame's lines. `failed` is why the view could not be updated.
pub(super) fn draw(
    view: &View,
    chosen: Chosen,
    failed: Option<&str>,
    (width, height): (usize, usize),
) -> Vec<String> {
    let mut lines = vec![headline(view, failed)];
    let servers = view.servers.len().min(if height > 40 { 16 } else { SERVERS });
    lines.extend(view.servers.iter().take(servers).map(server_line));
    if view.servers.len() > servers {
        lines.push(format!("and {} servers more", view.servers.len() - servers));
    }
    let at = chosen.job.min(view.jobs.len().saturating_sub(1));
    lines.push(tab_line(view, at));
    let room = height.saturating_sub(lines.len() + 1);
    let mut body = match view.jobs.get(at) {
        _ if chosen.help => KEYS.map(String::from).to_vec(),
        Some(job) => job_lines(job, chosen.scrolled, (width, room)),
        None => vec!["no jobs: a worker opens one, as `longshore train --servers ...` does".into()],
    };
    body.resize(room, String::new());
    lines.append(&mut body);
    lines.push(styled(quiet(), "q end   Tab next job   arrows job, ranks   ? help"));
    lines.iter().take(height).map(|line| truncate_str(line, width, "").into_owned()).collect()
}

/// Returns text from anywhere in a style, without characters that command a terminal.
fn styled(style: Style, text: &str) -> String {
    style.apply_to(legible(text)).to_string()
}

fn good() -> Style {
    Style::new().green()
}

fn warn() -> Style {
    Style::new().yellow()
}

fn bad() -> Style {
    Style::new().red()
}

fn quiet() -> Style {
    Style::new().dim()
}

fn beside(left: &[String], right: &[String], width: usize) -> Vec<String> {
    let cell = |column: &[String], row: usize| column.get(row).cloned().unwrap_or_default();
    let line = |row| {
        let left = cell(left, row);
        format!("{}  {}", pad_str(&left, width, Alignment::Left, Some("")), cell(right, row))
    };
    (0..left.len().max(right.len())).map(line).collect()
}

fn headline(view: &View, failed: Option<&str>) -> String {
    let title = styled(Style::new().bold(), "longshore top");
    let failed = failed.map(|why| format!("  {}", styled(bad(), why))).unwrap_or_default();
    format!("{title}  {}, {}{failed}", many(view.servers.len(), "server"), many(view.jobs.len(), "job"))
}

fn server_line(server: &ServerView) -> String {
    if let Some(why) = &server.silent {
        return styled(bad(), &format!("{}  {why}", server.address));
    }
    let share = server.memory_reserved as f64 / server.memory_budget.max(1) as f64;
    let bar = styled(if share > 0.9 { warn() } else { good() }, &bar(share));
    let (reserved, budget) = (human(server.memory_reserved), human(server.memory_budget));
    let release = styled(quiet(), &server.release);
    format!("{:<21} {bar} {reserved} of {budget} reserved  {release}", legible(&server.address))
}

fn many(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn bar(share: f64) -> String {
    let full = (share.clamp(0.0, 1.0) * BAR as f64).round() as usize;
    format!("[{}{}]", "#".repeat(full), "-".repeat(BAR - full))
}

/// Returns the jobs' names. The chosen job's name is reversed, even if NO_COLOR forbids other styles.
fn tab_line(view: &View, at: usize) -> String {
    let style = |index| if index == at { Style::new().reverse().force_styling(true) } else { Style::new() };
    let tab = |(index, job): (usize, &JobView)| styled(style(index), &format!(" {} ", job.job));
    view.jobs.iter().enumerate().map(tab).collect()
}

fn job_lines(job: &JobView, scrolled: usize, (width, room): (usize, usize)) -> Vec<String> {
    let mut lines = vec![state_line(job)];
    lines.extend(job.moves.as_ref().map(moves_line));
    // Long reasons are cut if the charts would have no room.
    let most = room.saturating_sub(12).max(2);
    lines.extend(job.troubles.iter().flat_map(|trouble| trouble_lines(job, trouble, width)).take(most));
    lines.extend(fact_lines(job));
    let below = (job.parts.len().max(job.ranks.len()) + 1).clamp(3, (room / 3).max(3));
    let charts = room.saturating_sub(lines.len() + below).max(6);
    lines.extend(chart_lines(job, width, charts));
    let (parts, ranks) = (part_lines(job), rank_lines(job, scrolled));
    lines.extend(beside(&parts, &ranks, width.saturating_sub(RANKS + 2)).into_iter().take(below));
    lines
}

fn state_line(job: &JobView) -> String {
    let (name, style) = match job.state {
        State::Training => ("training", good()),
        State::Idle => ("idle", quiet()),
        State::Paused => ("paused", warn()),
        State::Loading => ("loading", warn()),
        State::Failed => ("failed", bad()),
        State::Away => ("away", bad()),
    };
    // Without a rank, no process waits.
    let waits = if job.waiting_for.is_empty() || job.state == State::Idle {
        String::new()
    } else {
        styled(quiet(), &format!("  waits for {}", job.waiting_for))
    };
    format!(
        "{}  version {} ({} applied)  {:.2} M parameters, {} tensors{waits}",
        styled(style, name),
        job.version,
        job.applied,
        job.parameters as f64 / 1e6,
        job.tensors
    )
}

fn moves_line(moves: &MovesView) -> String {
    let (shards, fetched) = (many(moves.awaited_shards as usize, "shard"), human(moves.fetched_bytes));
    let text = format!("moves: {shards} on the way, {fetched} fetched, to {}", moves.wanted.join(", "));
    styled(if moves.obstacle.is_empty() { good() } else { warn() }, &text)
}

/// Returns a trouble and its remedy, in lines that break between words.
fn trouble_lines(job: &JobView, trouble: &Trouble, width: usize) -> Vec<String> {
    let style = if matches!(job.state, State::Failed | State::Away) { bad() } else { warn() };
    let (what, remedy) = match trouble.remedy.as_str() {
        "" => (trouble.what.clone(), String::new()),
        remedy => (format!("{}.", trouble.what), format!("Remedy: {remedy}")),
    };
    let words = what.split(' ').map(|word| (style.clone(), word));
    let words = words.chain(remedy.split(' ').map(|word| (Style::new(), word)));
    let mut lines = vec![String::new()];
    for (style, word) in words.filter(|(_, word)| !word.is_empty()) {
        let letters: Vec<char> = legible(word).chars().collect();
        for part in letters.chunks(width.max(1)) {
            let part = styled(style.clone(), &part.iter().collect::<String>());
            match lines.last_mut() {
                Some(line) if line.is_empty() => *line = part,
                Some(line) if measure_text_width(line) + 1 + measure_text_width(&part) <= width => {
                    *line = format!("{line} {part}");
                }
                _ => lines.push(part),
            }
        }
    }
    lines
}

fn fact_lines(job: &JobView) -> Vec<String> {
    let of = |value: Option<f64>, show: fn(f64) -> String| value.map_or_else(|| "-".to_string(), show);
    let last = |value: fn(&StepView) -> Option<f64>| job.steps.iter().rev().find_map(value);
    let first = [
        ("steps/s", of(job.steps_per_s, number)),
        ("loss", of(last(|step| step.loss), number)),
        ("exposed", of(last(|step| step.exposed_seconds), seconds)),
        ("norm", of(last(norm), number)),
    ];
    let second = [
        ("pushed", of(job.pushed_per_s, speed)),
        ("pulled", of(job.pulled_per_s, speed)),
        ("update", of(job.update_per_s, speed)),
        ("rate", of(last(|step| Some(step.learning_rate)), number)),
    ];
    let fact = |(name, value): (&str, String)| format!("{} {value:<12}", styled(quiet(), name));
    [first, second].map(|facts| facts.map(fact).concat()).to_vec()
}

fn chart_lines(job: &JobView, width: usize, height: usize) -> Vec<String> {
    let (column, upper) = (width.saturating_sub(2) / 2, height / 2);
    let chart = |name: &str, value: fn(&StepView) -> Option<f64>, show, height| {
        let values: Vec<f64> = job.steps.iter().filter_map(value).filter(|value| value.is_finite()).collect();
        chart(name, &values, show, (column, height))
    };
    let loss = chart("loss", |step| step.loss, number, upper);
    let step = chart("step", |step| step.seconds, seconds, upper);
    let exposed = chart("exposed", |step| step.exposed_seconds, seconds, height - upper);
    let norm = chart("norm", norm, number, height - upper);
    [beside(&loss, &step, column), beside(&exposed, &norm, column)].concat()
}

/// Returns a title and bars of the last values that fit, with their range.
fn chart(
    name: &str,
    values: &[f64],
    show: fn(f64) -> String,
    (width, height): (usize, usize),
) -> Vec<String> {
    let shown = &values[values.len().saturating_sub(width)..];
    let (low, high) = shown
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &value| (low.min(value), high.max(value)));
    let title = match shown.last() {
        Some(&last) => format!("{name} {}  ({} to {})", show(last), show(low), show(high)),
        None => format!("{name} -"),
    };
    let rows = height.saturating_sub(1);
    let range = if high > low { high - low } else { 1.0 };
    // Heights are in eighths of a cell, and begin at 1: the lowest value is visible too.
    let scale = (8 * rows).saturating_sub(1) as f64 / range;
    let heights: Vec<usize> = shown.iter().map(|value| 1 + ((value - low) * scale) as usize).collect();
    let row = |row: usize| {
        let cells = heights.iter().map(|height| CELLS[height.saturating_sub(8 * row).min(8)]);
        styled(good(), &cells.collect::<String>())
    };
    let title = std::iter::once(styled(quiet(), &title));
    title.chain((0..rows).rev().map(row)).collect()
}

/// Returns the norm of a step; None for a skipped step.
fn norm(step: &StepView) -> Option<f64> {
    (!step.skipped).then_some(step.norm)
}

fn number(value: f64) -> String {
    match value.abs() {
        size if size != 0.0 && !(1e-3..1e6).contains(&size) => format!("{value:.2e}"),
        size if size >= 100.0 => format!("{value:.0}"),
        _ => format!("{value:.3}"),
    }
}

fn seconds(value: f64) -> String {
    if value < 1.0 { format!("{:.1} ms", value * 1e3) } else { format!("{value:.2} s") }
}

fn speed(value: f64) -> String {
    if value < 1e9 { format!("{:.1} MB/s", value / 1e6) } else { format!("{:.2} GB/s", value / 1e9) }
}

fn part_lines(job: &JobView) -> Vec<String> {
    let newest = job.parts.iter().map(|part| part.version).max();
    let line = |part: &Part| {
        let drives = match part.drive_bytes {
            0 => "-".to_string(),
            bytes => format!("{}, {} written", human(bytes), human(part.written_bytes)),
        };
        let late = Some(part.version) != newest;
        let memory = human(part.memory_bytes);
        let text = format!("{:<21} {:<8} {memory:<9} {drives}", part.server, part.version);
        styled(if late { warn() } else { Style::new() }, &text)
    };
    let head = styled(quiet(), "server                version  memory    drives");
    std::iter::once(head).chain(job.parts.iter().map(line)).collect()
}

fn rank_lines(job: &JobView, scrolled: usize) -> Vec<String> {
    let line = |rank: &RankView| {
        let by = if rank.transport.is_empty() { "-" } else { &rank.transport };
        let text = format!("{:<5} {:<13} {by:<6} {}", rank.rank, rank.state, rank.last_step);
        styled(if rank.state == "joined" { Style::new() } else { quiet() }, &text)
    };
    let scrolled = scrolled.min(job.ranks.len().saturating_sub(1));
    let head = styled(quiet(), "rank  state         by     last step");
    std::iter::once(head).chain(job.ranks.iter().skip(scrolled).map(line)).collect()
}

#[cfg(test)]
mod tests {
    use longshore_proto::{Fault, FaultKind};
    use longshore_wire::v1::{self, DescribeResponse};

    use super::{
        super::{
            job::tests::{answer, view_of},
            screen::frame_of,
        },
        *,
    };

    fn server() -> ServerView {
        let (memory_budget, memory_reserved) = (1 << 30, 1 << 29);
        ServerView {
            address: "host1:7070".into(),
            memory_budget,
            memory_reserved,
            release: "0.1.0".into(),
            silent: None,
        }
    }

    /// Asserts that a frame of 80x24 shows all of these words.
    #[track_caller]
    fn shows(view: &View, chosen: Chosen, words: &[&str]) {
        let frame = frame_of(view, chosen, (80, 24));
        assert_eq!(frame.lines().count(), 24, "{frame}");
        // Lines break between any two words.
        let joined = frame.split_whitespace().collect::<Vec<_>>().join(" ");
        for word in words {
            assert!(frame.contains(word) || joined.contains(word), "{word:?} is missing:\n{frame}");
        }
    }

    #[track_caller]
    fn job_shows(answer: Result<DescribeResponse, Fault>, words: &[&str]) {
        shows(&View { servers: vec![server()], jobs: vec![view_of(answer)] }, Chosen::default(), words);
    }

    #[test]
    fn nothing_runs() {
        let view = View { servers: vec![server()], jobs: Vec::new() };
        shows(&view, Chosen::default(), &["[########--------] 512 MiB of 1.00 GiB", "0.1.0", "no jobs"]);
        let silent = ServerView { silent: Some("cannot be reached".into()), ..server() };
        let view = View { servers: vec![silent], jobs: Vec::new() };
        shows(&view, Chosen::default(), &["host1:7070  cannot be reached"]);
    }

    #[test]
    fn a_job_trains() {
        job_shows(
            Ok(answer(100, 100)),
            &[
                "training  version 100 (100 applied)  0.88 M parameters, 60 tensors",
                "steps/s 2.000",
                "loss 4.000",
                "exposed 10.0 ms",
                "norm 101",
                "norm 101  (63.000 to 101)",
                "█",
                "host1:7070            100      30.0 MiB    0     joined        tcp    100",
                "q end",
            ],
        );
        let mut idle = answer(3, 0);
        idle.ranks[0].left = true;
        job_shows(Ok(idle), &["idle  version 3", "0     left"]);
    }

    #[test]
    fn a_job_moves() {
        let scaling = v1::Scaling {
            wanted: vec!["host2:7070".into()],
            asked_micros: 9,
            awaited_shards: 1,
            fetched_bytes: 5 << 20,
            failure: "no room".into(),
            ..Default::default()
        };
        let moving = DescribeResponse { scaling: Some(scaling), ..answer(50, 0) };
        job_shows(
            Ok(moving),
            &["moves: 1 shard on the way, 5.00 MiB fetched, to host2:7070", "cannot move yet: no room"],
        );
    }

    #[test]
    fn a_job_stalls() {
        let waits = DescribeResponse { waiting_for: "a gradient of rank 1".into(), ..answer(50, 60_000) };
        job_shows(Ok(waits), &["nothing was decided for 60 s", "rank 1", "Remedy: see whether", "█"]);
    }

    #[test]
    fn a_job_fails_or_pauses_or_is_away() {
        let failed = DescribeResponse { failure: "\u{1b}[31mdrive /mnt/a is gone".into(), ..answer(9, 0) };
        job_shows(
            Ok(failed),
            &["failed  version 9", "[31mdrive /mnt/a is gone", "Remedy: see that server's log"],
        );
        let mut paused = answer(9, 0);
        let progress = paused.progress.as_mut().unwrap();
        (progress.phase, progress.pause_reason) = (v1::Phase::Paused.into(), "overflow in wte".into());
        job_shows(Ok(paused), &["paused: overflow in wte", "`longshore resume`"]);
        let fault = Fault::new(FaultKind::Internal, "state", "unreadable", "whole", "restore a checkpoint");
        job_shows(Err(fault), &["away", "state is unreadable", "Remedy: restore a checkpoint"]);
    }

    #[test]
    fn keys_choose_and_help() {
        let mut second = view_of(Ok(answer(7, 0)));
        second.job = "second".into();
        let view = View { servers: vec![server()], jobs: vec![view_of(Ok(answer(5, 0))), second] };
        shows(&view, Chosen { job: 1, ..Chosen::default() }, &[" default  second", "version 7 "]);
        shows(&view, Chosen { help: true, ..Chosen::default() }, &["keys", "Tab, Right       next job"]);
        // Frames of any size are drawn.
        for size in [(10, 3), (1, 1), (200, 60)] {
            frame_of(&view, Chosen::default(), size);
        }
    }
}
