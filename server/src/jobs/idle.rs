//! Idle time of a job.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use longshore_engine::{
    job::Job,
    step::{Phase, Progress, RankProgress, Restoring},
};
use longshore_proto::Version;

use crate::lock::lock;

/// Fingerprint of a job's use. A changed fingerprint means that the job was used since the last look. Looks are a
/// second apart, so calls need no bookkeeping.
#[derive(PartialEq)]
struct Sign {
    /// Bytes of payload pushed and pulled.
    traffic: (u64, u64),
    version: Version,
    phase: Phase,
    /// Shards that wait for weights.
    missing: usize,
    restoring: Option<Restoring>,
    ranks: Vec<RankProgress>,
    /// Number of restores begun. A restore that only verifies changes no other field.
    restores: u64,
}

impl Sign {
    fn of(job: &Job, restores: u64) -> Sign {
        let Progress { version, phase, missing, restoring, .. } = job.progress();
        let (traffic, missing, ranks) = (job.traffic(), missing.len(), job.protocol.ranks());
        Sign { traffic, version, phase, missing, restoring, ranks, restores }
    }
}

pub(crate) struct Idle(Mutex<State>);

struct State {
    sign: Sign,
    since: Instant,
}

impl Idle {
    pub(super) fn new(job: &Job) -> Idle {
        Idle(Mutex::new(State { sign: Sign::of(job, 0), since: Instant::now() }))
    }

    /// Returns how long the job has been unused. The pair holds the number of restores begun, and whether a restore is
    /// in progress.
    pub(super) fn look(&self, job: &Job, (restores, restoring): (u64, bool)) -> Duration {
        let sign = Sign::of(job, restores);
        let mut state = lock(&self.0);
        if state.sign != sign || restoring || job.snapshots.len() > 0 {
            *state = State { sign, since: Instant::now() };
        }
        state.since.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use longshore_engine::job::{Exported, UploadChunk};
    use longshore_proto::{
        ChunkId, Incarnation, Rank, ShardId, StateArray, checksum::crc32, limits::BLOCK_ELEMENTS,
    };

    use super::*;
    use crate::jobs::tests::{jobs, wanted};

    #[tokio::test]
    async fn a_copy_is_a_use() {
        let (_, handle) = jobs().open(wanted("run", None), false, Incarnation::default()).await.unwrap();
        let (job, incarnation) = (&handle.job, Incarnation(1));
        job.join(Rank(0), incarnation, None).unwrap();
        let payload = vec![0; BLOCK_ELEMENTS as usize * 4];
        let chunk = UploadChunk {
            shard: ShardId(0),
            array: StateArray::Master,
            chunk: ChunkId(0),
            applied: None,
            left_out: Vec::new(),
            crc32: crc32(&payload),
        };
        job.upload_chunk(incarnation, chunk, &payload).unwrap();
        let idle = Idle::new(job);
        let unused = Instant::now();
        let is_unused = || {
            let least = unused.elapsed();
            idle.look(job, (0, false)) >= least
        };
        assert!(is_unused());
        {
            let _copy = job.begin_export(None, Exported::State).unwrap();
            assert!(!is_unused(), "an export");
        }
        let ended = Instant::now();
        assert!(idle.look(job, (0, false)) >= ended.elapsed());
    }
}
