//! Metrics of drives: requests, latencies, requests in flight, and shards taken from DRAM instead of a drive.

use std::fmt;

use longshore_engine::io::{Counted, LATENCIES, Operation};
use prometheus_client::registry::Unit;

use super::{
    families::{Families, Labels, one, with},
    seen::Seen,
};
use crate::service::Services;

pub(super) fn write(families: &mut Families<'_>, services: &Services, jobs: &[Seen]) -> fmt::Result {
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
