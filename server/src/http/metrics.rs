//! `/metrics`, rendered at each scrape. Steps pay for a few counters, and nothing for the text.
//!
//! Readers that accept OpenMetrics, such as Prometheus, get that format. Other readers get Prometheus' older text
//! format.
//!
//! The number of samples is bounded: about 60 a job, 19 of them of the histogram. Each of a job's first [`RANKS`] ranks
//! adds one sample, and two for each transport of its payload. An identity adds 4, and a folder of `--state-dir` 56.

use std::{
    fmt,
    time::{SystemTime, UNIX_EPOCH},
};

use longshore_engine::io::{Counted, LATENCIES, Operation};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeMetric, NoLabelSet, text},
    metrics::{MetricType, histogram::Histogram},
    registry::{Registry, Unit},
};

use super::seen::{Seen, resident_bytes};
use crate::{
    jobs::{Decided, RANKS, StepStage},
    quota::{Listed, Usage},
    refusals,
    service::Services,
    trust::Register,
};

/// Format of the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    OpenMetrics,
    Text,
}

impl Format {
    pub(super) fn of(accept: &str) -> Format {
        if accept.contains("application/openmetrics-text") { Format::OpenMetrics } else { Format::Text }
    }

    pub(super) fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

pub(super) fn text(services: Services, format: Format) -> String {
    let mut registry = Registry::with_prefix("longshore");
    registry.register_collector(Box::new(Scrape { services }));
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = text::encode(&mut text, &registry);
    if format == Format::Text { older(&text) } else { text }
}

/// Converts OpenMetrics to the older format, in which a counter's family is named with `_total`, like its samples. The
/// older format has no units and no end mark.
fn older(text: &str) -> String {
    let mut lines = Vec::new();
    for line in text.lines() {
        let comment = line.strip_prefix("# TYPE ").and_then(|rest| rest.strip_suffix(" counter"));
        if let Some(family) = comment {
            let help: Option<String> = lines.pop();
            lines.extend(help.map(|help| help.replacen(family, &format!("{family}_total"), 1)));
            lines.push(format!("# TYPE {family}_total counter"));
        } else if !line.starts_with("# UNIT ") && line != "# EOF" {
            lines.push(line.to_string());
        }
    }
    lines.join("\n") + "\n"
}

struct Scrape {
    services: Services,
}

impl fmt::Debug for Scrape {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Scrape")
    }
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut families = Families { encoder };
        let seen = |handle| Seen::now(&self.services, handle);
        let jobs: Vec<Seen> = self.services.jobs.all().into_iter().map(seen).collect();
        server(&mut families, &self.services)?;
        trust(&mut families, &self.services)?;
        states(&mut families, &self.services, &jobs)?;
        steps(&mut families, &jobs)?;
        work(&mut families, &jobs)?;
        room(&mut families, &jobs)?;
        owners(&mut families, &self.services)?;
        ranks(&mut families, &jobs)?;
        checkpoints(&mut families, &jobs)?;
        drives(&mut families, &self.services, &jobs)
    }
}

fn each<'a, V>(jobs: &'a [Seen], value: impl Fn(&'a Seen) -> V) -> impl Iterator<Item = (Labels, V)> {
    jobs.iter().map(move |job| (job.labels(), value(job)))
}

fn server(families: &mut Families<'_>, services: &Services) -> fmt::Result {
    let budget = services.jobs.budget();
    let bytes = || Some(Unit::Bytes);
    let build = with(Labels::new(), "version", env!("CARGO_PKG_VERSION"));
    families.gauge("build", "The server's version, as a label.", None, [(build, 1)])?;
    let draining = i64::from(services.draining.refuse().is_err());
    families.gauge("draining", "1 once a drain has begun.", None, one(draining))?;
    families.gauge("memory_budget", "Memory that jobs may take.", bytes(), one(budget.total()))?;
    families.gauge(
        "memory_reserved",
        "Memory that jobs were admitted to.",
        bytes(),
        one(budget.reserved()),
    )?;
    if let Some(resident) = resident_bytes() {
        families.gauge(
            "memory_resident",
            "Memory of the process that is in DRAM.",
            bytes(),
            one(resident),
        )?;
    }
    let bounds = &services.bounds;
    families.gauge(
        "connections",
        "Connections of workers and operators.",
        None,
        one(bounds.connections()),
    )?;
    families.gauge("calls", "Calls under way.", None, one(bounds.calls()))?;
    let refused = refusals::counts().map(|(kind, count)| (vec![("kind", kind.name().to_string())], count));
    let help = "Calls and pushed chunks that this process refused, by kind of error.";
    families.counter("refused_calls", help, None, refused)
}

fn trust(families: &mut Families<'_>, services: &Services) -> fmt::Result {
    let register = services.register.as_deref();
    let help = "1 while changed files of --tls-dir cannot be used, and those before stay in use.";
    let unusable = register.map(|register| (Labels::new(), i64::from(register.is_unusable())));
    families.gauge("tls_dir_unusable", help, None, unusable)?;
    let help = "When the file's first certificate expires, in seconds since 1970.";
    let seconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let expiries = register.map(Register::expiries).into_iter().flatten();
    let expiries = expiries.map(|(file, at)| (with(Labels::new(), "file", file), seconds(at)));
    families.gauge("certificate_expiry_timestamp", help, Some(Unit::Seconds), expiries)
}

fn states(families: &mut Families<'_>, services: &Services, jobs: &[Seen]) -> fmt::Result {
    let count = |state| jobs.iter().filter(|job| job.state() == state).count();
    let mut counts =
        ["loading", "training", "idle", "paused", "failed"].map(|state| (state, count(state))).to_vec();
    counts.push(("away", services.jobs.away().len()));
    let samples = counts.into_iter().map(|(state, count)| (with(Labels::new(), "state", state), count));
    families.gauge(
        "jobs",
        "Jobs by state. One that is away is kept here and not served now.",
        None,
        samples,
    )?;
    families.gauge(
        "job_trains",
        "1 while the job takes steps: it is filled, has a connected rank, is not paused, and has not failed here.",
        None,
        each(jobs, |job| i64::from(job.state() == "training")),
    )
}

fn steps(families: &mut Families<'_>, jobs: &[Seen]) -> fmt::Result {
    let decided = "Decided steps, skipped ones included.";
    families.gauge("job_version", decided, None, each(jobs, |job| job.progress.version.0))?;
    let durable = "The newest version that no crash of this server takes back.";
    families.gauge(
        "job_durable_version",
        durable,
        None,
        each(jobs, |job| job.handle.job.protocol.durable().0),
    )?;
    let applied = "Decided steps that updated: Adam's t.";
    families.gauge("job_applied", applied, None, each(jobs, |job| job.progress.applied))?;
    let outcomes = jobs.iter().flat_map(|job| {
        let (applied, skipped) = job.handle.history.counts();
        let outcome = |(outcome, count)| (with(job.labels(), "outcome", outcome), count);
        [("applied", applied), ("skipped", skipped)].map(outcome)
    });
    families.counter("job_steps", "Steps decided since the job was opened here.", None, outcomes)?;
    let times = each(jobs, |job| job.handle.history.seconds());
    families.histogram("job_step", "From decision to decision.", Some(Unit::Seconds), times)?;
    let last = |value: fn(&Decided) -> f64| {
        jobs.iter().filter_map(move |job| Some((job.labels(), value(&job.handle.history.last()?))))
    };
    families.gauge("job_gradient_norm", "Before clipping.", None, last(|step| step.norm))?;
    families.gauge("job_clip_coefficient", "1: not clipped.", None, last(|step| step.clip_coefficient))?;
    families.gauge("job_loss_scale", "For the next step.", None, last(|step| step.loss_scale))?;
    let said = |value: fn(&Decided) -> Option<f64>| {
        jobs.iter().filter_map(move |job| Some((job.labels(), value(&job.handle.history.last()?)?)))
    };
    families.gauge("job_loss", "Of the last step, as rank 0 sees it.", None, said(|step| step.loss))?;
    let exposed = "How long offloading held up rank 0's trainer, in the last step but one.";
    families.gauge("job_exposed", exposed, Some(Unit::Seconds), said(|step| step.exposed_seconds))?;
    let rate = "That of the first param group.";
    families.gauge("job_learning_rate", rate, None, last(|step| step.learning_rate))
}

fn work(families: &mut Families<'_>, jobs: &[Seen]) -> fmt::Result {
    let (bytes, seconds) = (|| Some(Unit::Bytes), || Some(Unit::Seconds));
    let sums = "Time of the compute thread in sums and gradient statistics.";
    families.counter("job_sum", sums, seconds(), each(jobs, |job| job.handle.busy.sums().as_secs_f64()))?;
    let updates = "Time of the compute thread in updates, and in waits for drives.";
    let times = each(jobs, |job| job.handle.busy.updates().as_secs_f64());
    families.counter("job_update", updates, seconds(), times)?;
    let stages = jobs.iter().flat_map(|job| {
        let stage =
            |stage: StepStage| (with(job.labels(), "stage", stage.name()), job.handle.stages.seconds(stage));
        StepStage::ALL.map(stage)
    });
    let help = "Time of the steps' stages. A stage of one step may overlap another step's.";
    families.counter("job_stage", help, seconds(), stages)?;
    let queued = "Sums and updates that wait for the compute thread or are with it.";
    families.gauge("job_queued_work", queued, None, each(jobs, |job| job.handle.busy.queued()))?;
    let moved = "Memory traffic of the updates since the job was opened here: state in and out, gradients in, images out.";
    families.counter("job_update", moved, bytes(), each(jobs, |job| job.handle.job.updated_bytes()))?;
    let pushed = "Payload of gradients since the job was opened here.";
    families.counter("job_pushed", pushed, bytes(), each(jobs, |job| job.handle.job.traffic().0))?;
    let pulled = "Payload of weights since the job was opened here.";
    families.counter("job_pulled", pulled, bytes(), each(jobs, |job| job.handle.job.traffic().1))?;
    let written = "Bytes that the drives of --state-dir were given since the job was opened here.";
    families.counter("job_drives_written", written, bytes(), each(jobs, |job| job.handle.job.written_bytes()))
}

fn room(families: &mut Families<'_>, jobs: &[Seen]) -> fmt::Result {
    let bytes = || Some(Unit::Bytes);
    let memory = each(jobs, |job| job.handle.job.memory_bytes());
    families.gauge("job_memory", "Memory reserved for the job.", bytes(), memory)?;
    let drives = each(jobs, |job| job.handle.job.disk_bytes());
    families.gauge("job_drives", "Space reserved in --state-dir.", bytes(), drives)?;
    let idle = "For how long nobody has trained, filled or read the job.";
    let times = each(jobs, |job| job.handle.look().as_secs_f64());
    families.gauge("job_idle", idle, Some(Unit::Seconds), times)?;
    let fetched = |job: &Seen| job.handle.fetching.fetched();
    let awaited = "Shards that have moved here and whose state is on its way.";
    families.gauge("job_awaited_shards", awaited, None, each(jobs, |job| job.handle.job.lacking()))?;
    let unreplicated = "Shards of the job without the replica that they should have.";
    families.gauge(
        "job_unreplicated_shards",
        unreplicated,
        None,
        each(jobs, |job| job.handle.job.placement().unreplicated()),
    )?;
    let broken = "Shards with replicas of which a bit has flipped in this server's memory.";
    families.counter("job_broken_shards", broken, None, each(jobs, |job| job.handle.job.broken_so_far()))?;
    let bytes_fetched = "State of shards that have moved here.";
    families.counter("job_fetched", bytes_fetched, bytes(), each(jobs, move |job| fetched(job).bytes))?;
    let held = "Time that updates waited for state on its way.";
    let seconds = Some(Unit::Seconds);
    families.counter("job_held", held, seconds, each(jobs, move |job| fetched(job).held.as_secs_f64()))?;
    let elements = "Elements of the shards that this server owns.";
    families.gauge("job_elements", elements, None, each(jobs, |job| job.handle.elements()))
}

/// Writes the samples of identities: those in `identities.toml`, and removed ones that still have jobs.
fn owners(families: &mut Families<'_>, services: &Services) -> fmt::Result {
    let owners = services.jobs.owners();
    let each = |value: fn(&(Listed, Usage)) -> u64| {
        owners.iter().map(move |of| (with(Labels::new(), "identity", &of.0.name), value(of)))
    };
    families.gauge("identity_jobs", "Jobs that the identity opened.", None, each(|(_, has)| has.jobs))?;
    let memory = "Memory reserved for them.";
    families.gauge("identity_memory", memory, Some(Unit::Bytes), each(|(_, has)| has.memory))?;
    let drives = "Space reserved for them in --state-dir.";
    families.gauge("identity_drives", drives, Some(Unit::Bytes), each(|(_, has)| has.drives))?;
    let connections = "Connections on which the identity has called.";
    families.gauge("identity_connections", connections, None, each(|(owner, _)| owner.connections))
}

fn ranks(families: &mut Families<'_>, jobs: &[Seen]) -> fmt::Result {
    let states = jobs.iter().flat_map(|job| {
        ["joined", "not connected", "left", "never joined"].map(|state| {
            let count = job.standings.iter().filter(|standing| **standing == state).count();
            (with(job.labels(), "state", state), count)
        })
    });
    families.gauge("job_ranks", "Ranks by state.", None, states)?;
    let last = jobs.iter().flat_map(|job| {
        let ranks = job.ranks.iter().take(RANKS);
        ranks.map(|rank| (with(job.labels(), "rank", rank.rank.0), rank.last_step.0))
    });
    families.gauge("job_rank_last_step", "The newest step that the rank has pushed to.", None, last)?;
    let (bytes, traffic) = (|| Some(Unit::Bytes), |job: &Seen| job.labels());
    let by_way = |labels: Labels, (rank, transport, bytes): (usize, &'static str, u64)| {
        (with(with(labels, "rank", rank), "transport", transport), bytes)
    };
    let pushed = jobs
        .iter()
        .flat_map(|job| job.handle.traffic.all_pushed().map(move |counted| by_way(traffic(job), counted)));
    families.counter(
        "job_rank_pushed",
        "Payload of the rank's gradients, by how it came.",
        bytes(),
        pushed,
    )?;
    let pulled = jobs
        .iter()
        .flat_map(|job| job.handle.traffic.all_pulled().map(move |counted| by_way(traffic(job), counted)));
    families.counter("job_rank_pulled", "Payload of the rank's weights, by how it left.", bytes(), pulled)?;
    let waits = each(jobs, |job| i64::from(!job.waiting_for().is_empty()));
    families.gauge(
        "job_waits",
        "1 while the next step waits for a rank, and some rank has joined and not left.",
        None,
        waits,
    )
}

fn checkpoints(families: &mut Families<'_>, jobs: &[Seen]) -> fmt::Result {
    let logged = |job: &Seen| Some((job.labels(), job.handle.checkpoints.last()?));
    let logged: Vec<_> = jobs.iter().filter_map(logged).collect();
    let sealed = || logged.iter().filter(|(_, status)| !status.name.is_empty());
    families.gauge(
        "job_checkpoint_version",
        "The version of the last checkpoint sealed since the server started.",
        None,
        sealed().map(|(labels, status)| (labels.clone(), status.version)),
    )?;
    families.gauge(
        "job_checkpoint_sealed_timestamp",
        "When that was, in seconds since 1970.",
        Some(Unit::Seconds),
        sealed().map(|(labels, status)| (labels.clone(), status.sealed_unix_ms as f64 / 1e3)),
    )?;
    families.gauge(
        "job_checkpoint_failed",
        "1 if the last attempt at a checkpoint failed.",
        None,
        logged.iter().map(|(labels, status)| (labels.clone(), i64::from(!status.failure.is_empty()))),
    )
}

/// Writes the samples of drives: requests, latencies, requests in flight, and shards taken from DRAM instead of a
/// drive.
fn drives(families: &mut Families<'_>, services: &Services, jobs: &[Seen]) -> fmt::Result {
    let mut counted: Vec<(Labels, Operation, Counted)> = Vec::new();
    for (folder, operations) in services.drives.counted() {
        let drive = with(Labels::new(), "drive", folder.display());
        let each = Operation::ALL.into_iter().zip(operations);
        counted.extend(each.map(|(operation, counts)| {
            (with(drive.clone(), "operation", operation.name()), operation, counts)
        }));
    }
    let times = counted.iter().map(|(labels, _, counts)| {
        let ends = LATENCIES.iter().map(|end| end.as_secs_f64()).chain([f64::MAX]);
        (labels.clone(), counts.time.as_secs_f64(), ends.zip(counts.latencies).collect())
    });
    let help = "How long requests to a state directory took, from when they were made: those of a shard are up to some tens of MB.";
    families.buckets("drive_request", help, Some(Unit::Seconds), times)?;
    let owed = counted.iter().map(|(labels, _, counts)| (labels.clone(), counts.under_way));
    families.gauge("drive_requests", "Requests that a state directory owes now.", None, owed)?;
    let moved = counted.iter().filter(|(_, operation, _)| *operation != Operation::Flush);
    let moved = moved.map(|(labels, _, counts)| (labels.clone(), counts.bytes));
    let help = "What was read from a state directory and written to it.";
    families.counter("drive", help, Some(Unit::Bytes), moved)?;
    if services.drive_endurance > 0 {
        let help = "What the drives together may be written with in their lives: --drive-endurance.";
        families.gauge("drives_endurance", help, Some(Unit::Bytes), one(services.drive_endurance))?;
    }
    let taken = jobs.iter().filter_map(|job| Some((job, job.handle.job.taken()?)));
    let taken = taken.flat_map(|(job, taken)| {
        [("resident", taken.resident), ("ahead", taken.ahead), ("waited", taken.waited)]
            .map(|(place, count)| (with(job.labels(), "place", place), count))
    });
    let help = "Shards of an nvme job by where they were when work needed them: resident in DRAM, read ahead, or still on a drive.";
    families.counter("job_shards_taken", help, None, taken)
}

/// Labels of one sample.
pub(super) type Labels = Vec<(&'static str, String)>;

fn one<V>(value: V) -> [(Labels, V); 1] {
    [(Labels::new(), value)]
}

fn with(mut labels: Labels, name: &'static str, value: impl ToString) -> Labels {
    labels.push((name, value.to_string()));
    labels
}

/// Writer of families in sequence. The first failure ends the scrape.
struct Families<'a> {
    encoder: DescriptorEncoder<'a>,
}

impl Families<'_> {
    fn gauge<V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        samples: impl IntoIterator<Item = (Labels, V)>,
    ) -> fmt::Result {
        let mut family = self.encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
        samples.into_iter().try_for_each(|(labels, value)| match labels.is_empty() {
            true => family.encode_gauge(&value),
            false => family.encode_family(&labels)?.encode_gauge(&value),
        })
    }

    /// Writes a counter. `name` is without the suffix `_total`.
    fn counter<V: EncodeCounterValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        samples: impl IntoIterator<Item = (Labels, V)>,
    ) -> fmt::Result {
        let mut family = self.encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Counter)?;
        samples.into_iter().try_for_each(|(labels, value)| {
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)
        })
    }

    fn histogram<'a>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        samples: impl IntoIterator<Item = (Labels, &'a Histogram)>,
    ) -> fmt::Result {
        let mut family = self.encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Histogram)?;
        samples.into_iter().try_for_each(|(labels, value)| value.encode(family.encode_family(&labels)?))
    }

    /// Writes histograms counted elsewhere: each has a sum, and buckets with their upper bounds.
    fn buckets(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        samples: impl IntoIterator<Item = (Labels, f64, Vec<(f64, u64)>)>,
    ) -> fmt::Result {
        let mut family = self.encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Histogram)?;
        samples.into_iter().try_for_each(|(labels, sum, buckets)| {
            let count = buckets.iter().map(|(_, count)| count).sum();
            family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_format_names_counters_as_their_samples() {
        let text = "# HELP a_bytes What a is.\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\na_bytes_total 1\n\
                    # HELP b counter\n# TYPE b gauge\nb 2\n# EOF\n";
        let expected = "# HELP a_bytes_total What a is.\n# TYPE a_bytes_total counter\na_bytes_total 1\n\
                        # HELP b counter\n# TYPE b gauge\nb 2\n";
        assert_eq!(older(text), expected);
        assert_eq!(
            Format::of("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"),
            Format::OpenMetrics
        );
        assert_eq!(Format::of("*/*"), Format::Text);
    }
}
