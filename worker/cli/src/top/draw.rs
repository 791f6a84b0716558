//! Draws a view. A terminal of 80x24 shows everything; more room shows more servers, ranks and taller charts.

use longshore_proto::legible;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Clear, Paragraph, Wrap},
};

use super::{
    charts::{draw_charts, norm, number, seconds, speed},
    styles::{bad, good, quiet, warn},
    view::{JobView, RankView, ServerView, State, StepView, Trouble, View},
};
use crate::sizes::human;

/// Width of a bar of memory.
const BAR: usize = 16;
/// Width of the list of ranks.
const RANKS: u16 = 37;
/// The most servers shown in little room.
const SERVERS: usize = 4;
const HELP: &str = "\
q, Esc, Ctrl-C   end
Tab, Right       next job
Left             job before
Up, Down         scroll the ranks
?                this help";

/// The user's choices.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Chosen {
    pub(super) job: usize,
    /// The first rank shown.
    pub(super) scrolled: usize,
    pub(super) help: bool,
}

/// Draws one frame. `failed` is why the view could not be updated.
pub(super) fn draw(frame: &mut Frame<'_>, view: &View, chosen: Chosen, failed: Option<&str>) {
    let area = frame.area();
    let servers = view.servers.len().min(if area.height > 40 { 16 } else { SERVERS });
    let rest = usize::from(view.servers.len() > servers);
    let [head, list, tabs, body, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length((servers + rest) as u16),
        Constraint::Length(1),
        Constraint::Min(8),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(headline(view, failed), head);
    let mut lines: Vec<Line<'_>> = view.servers.iter().take(servers).map(server_line).collect();
    if rest > 0 {
        lines.push(Line::from(format!("and {} servers more", view.servers.len() - servers)));
    }
    frame.render_widget(Paragraph::new(lines), list);
    let at = chosen.job.min(view.jobs.len().saturating_sub(1));
    frame.render_widget(tab_line(view, at), tabs);
    match view.jobs.get(at) {
        Some(job) => draw_job(frame, body, job, chosen.scrolled),
        None => frame.render_widget(
            Paragraph::new("no jobs: a worker opens one, as `longshore train --servers ...` does"),
            body,
        ),
    }
    frame.render_widget(Line::styled("q end   Tab next job   arrows job, ranks   ? help", quiet()), foot);
    if chosen.help {
        draw_help(frame, area);
    }
}

fn headline<'a>(view: &View, failed: Option<&str>) -> Line<'a> {
    let title = Span::styled("longshore top", Style::new().add_modifier(Modifier::BOLD));
    let counts = format!("  {}, {}", many(view.servers.len(), "server"), many(view.jobs.len(), "job"));
    let failed = failed.map(|why| Span::styled(format!("  {why}"), bad())).unwrap_or_default();
    Line::from(vec![title, Span::raw(counts), failed])
}

fn server_line(server: &ServerView) -> Line<'_> {
    if let Some(why) = &server.silent {
        return Line::styled(format!("{}  {why}", server.address), bad());
    }
    let share = server.memory_reserved as f64 / server.memory_budget.max(1) as f64;
    let style = if share > 0.9 { warn() } else { good() };
    Line::from(vec![
        Span::raw(format!("{:<21} ", server.address)),
        Span::styled(bar(share), style),
        Span::raw(format!(" {} of {} reserved", human(server.memory_reserved), human(server.memory_budget))),
        Span::styled(format!("  {}", server.release), quiet()),
    ])
}

fn many(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn bar(share: f64) -> String {
    let full = (share.clamp(0.0, 1.0) * BAR as f64).round() as usize;
    format!("[{}{}]", "#".repeat(full), "-".repeat(BAR - full))
}

fn tab_line(view: &View, at: usize) -> Line<'_> {
    let tab = |(index, job): (usize, &JobView)| {
        let style = if index == at { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
        Span::styled(format!(" {} ", legible(&job.job)), style)
    };
    Line::from(view.jobs.iter().enumerate().map(tab).collect::<Vec<_>>())
}

fn draw_job(frame: &mut Frame<'_>, area: Rect, job: &JobView, scrolled: usize) {
    let troubles = trouble_lines(job);
    let wanted: usize = troubles.iter().map(|line| lines_of(&line.to_string(), area.width.into())).sum();
    // Long reasons are cut if the charts would have no room.
    let room = wanted.min(area.height.saturating_sub(12).max(2).into()) as u16;
    let said = Paragraph::new(troubles).wrap(Wrap { trim: true });
    let [state, said_at, facts, charts, below] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(room),
        Constraint::Length(2),
        Constraint::Min(6),
        Constraint::Length(
            ((job.parts.len().max(job.ranks.len()) + 1) as u16).clamp(3, (area.height / 3).max(3)),
        ),
    ])
    .areas(area);
    frame.render_widget(state_line(job), state);
    frame.render_widget(said, said_at);
    frame.render_widget(Paragraph::new(fact_lines(job)), facts);
    draw_charts(frame, charts, job);
    let columns = [Constraint::Min(20), Constraint::Length(RANKS)];
    let [parts, ranks] = Layout::horizontal(columns).spacing(1).areas(below);
    frame.render_widget(Paragraph::new(part_lines(job, parts.height)), parts);
    frame.render_widget(Paragraph::new(rank_lines(&job.ranks, scrolled)), ranks);
}

/// Returns the number of lines of a text that breaks between words.
fn lines_of(text: &str, width: usize) -> usize {
    let (mut lines, mut used) = (1, 0);
    // Several spaces in a row are drawn as they are.
    for word in text.split(' ') {
        let length = word.chars().count();
        let with = if used == 0 { length } else { used + 1 + length };
        if with > width && used > 0 {
            (lines, used) = (lines + 1, length);
        } else {
            used = with;
        }
    }
    lines
}

fn state_line(job: &JobView) -> Line<'_> {
    let (name, style) = match job.state {
        State::Training => ("training", good()),
        State::Idle => ("idle", quiet()),
        State::Paused => ("paused", warn()),
        State::Loading => ("loading", warn()),
        State::Failed => ("failed", bad()),
        State::Away => ("away", bad()),
    };
    let waits = match job.waiting_for.as_str() {
        // Without a rank, no process waits.
        "" => String::new(),
        _ if job.state == State::Idle => String::new(),
        waits => format!("  waits for {}", legible(waits)),
    };
    let counts = format!(
        "  version {} ({} applied)  {:.2} M parameters, {} tensors",
        job.version,
        job.applied,
        job.parameters as f64 / 1e6,
        job.tensors
    );
    Line::from(vec![Span::styled(name, style), Span::raw(counts), Span::styled(waits, quiet())])
}

fn trouble_lines(job: &JobView) -> Vec<Line<'_>> {
    let style = if matches!(job.state, State::Failed | State::Away) { bad() } else { warn() };
    let line = |Trouble { what, remedy }: &Trouble| {
        let what = Span::styled(legible(what).into_owned(), style);
        if remedy.is_empty() {
            return Line::from(what);
        }
        Line::from(vec![what, Span::styled(format!(". Remedy: {}", legible(remedy)), Style::new())])
    };
    job.troubles.iter().map(line).collect()
}

fn fact_lines(job: &JobView) -> Vec<Line<'static>> {
    let last = job.steps.last();
    let of = |value: Option<f64>, show: fn(f64) -> String| value.map_or_else(|| "-".to_string(), show);
    let first = [
        ("steps/s", of(job.steps_per_s, number)),
        ("loss", of(last_of(job, |step| step.loss), number)),
        ("exposed", of(last_of(job, |step| step.exposed_seconds), seconds)),
        ("norm", of(last_of(job, norm), number)),
    ];
    let second = [
        ("pushed", of(job.pushed_per_s, speed)),
        ("pulled", of(job.pulled_per_s, speed)),
        ("update", of(job.update_per_s, speed)),
        ("rate", of(last.map(|step| step.learning_rate), number)),
    ];
    let line = |facts: [(&'static str, String); 4]| {
        let spans = facts.into_iter().flat_map(|(name, value)| {
            [Span::styled(format!("{name} "), quiet()), Span::raw(format!("{value:<12}"))]
        });
        Line::from(spans.collect::<Vec<_>>())
    };
    vec![line(first), line(second)]
}

fn last_of(job: &JobView, of: fn(&StepView) -> Option<f64>) -> Option<f64> {
    job.steps.iter().rev().find_map(of)
}

fn part_lines(job: &JobView, height: u16) -> Vec<Line<'_>> {
    let mut lines = vec![Line::styled("server                version  memory    drives", quiet())];
    let most = job.parts.iter().map(|part| part.version).max();
    for part in job.parts.iter().take(height.saturating_sub(1) as usize) {
        let drives = match part.drive_bytes {
            0 => "-".to_string(),
            bytes => format!("{}, {} written", human(bytes), human(part.written_bytes)),
        };
        let text =
            format!("{:<21} {:<8} {:<9} {drives}", part.server, part.version, human(part.memory_bytes));
        let late = Some(part.version) != most;
        lines.push(Line::styled(text, if late { warn() } else { Style::new() }));
    }
    lines
}

fn rank_lines(ranks: &[RankView], scrolled: usize) -> Vec<Line<'_>> {
    let mut lines = vec![Line::styled("rank  state         by     last step", quiet())];
    for rank in ranks.iter().skip(scrolled.min(ranks.len().saturating_sub(1))) {
        let by = if rank.transport.is_empty() { "-" } else { &rank.transport };
        let text = format!("{:<5} {:<13} {by:<6} {}", rank.rank, rank.state, rank.last_step);
        lines.push(Line::styled(text, if rank.state == "joined" { Style::new() } else { quiet() }));
    }
    lines
}

fn draw_help(frame: &mut Frame<'_>, area: Rect) {
    let (width, height) = (36.min(area.width), 7.min(area.height));
    let place = Rect::new((area.width - width) / 2, (area.height - height) / 2, width, height);
    frame.render_widget(Clear, place);
    frame.render_widget(Paragraph::new(HELP).block(Block::bordered().title("keys")), place);
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
        let frame = frame_of(view, chosen, (80, 24)).unwrap();
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
                "host1:7070            100      30.0 MiB  -",
                "0     joined        tcp    100",
                "q end",
            ],
        );
        let mut idle = answer(3, 0);
        idle.ranks[0].left = true;
        job_shows(Ok(idle), &["idle  version 3", "0     left"]);
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
            frame_of(&view, Chosen::default(), size).unwrap();
        }
    }
}
