//! State hashes for all who ask, one at a time: of one version every block is hashed once, however many wait for it, and
//! while training goes on hashing takes a small part of the time.

use std::{sync::Arc, time::Duration};

use longshore_engine::job::{Job, SnapshotInfo};
use longshore_proto::{BlockId, Fault, FaultKind, checksum::BlockHash};
use tokio::{
    sync::Mutex,
    task::spawn_blocking,
    time::{Instant, sleep_until, timeout_at},
};

/// After hashes were taken they answer for their version, and those of the next one wait, for so many times as long.
const REST: u32 = 9;
/// But no longer than this: an operator waits.
const LONGEST_REST: Duration = Duration::from_secs(2);

/// Of one version of a job, in owned order.
#[derive(Clone)]
pub(crate) struct Hashes {
    pub(crate) info: SnapshotInfo,
    pub(crate) blocks: Arc<Vec<(BlockId, BlockHash)>>,
}

#[derive(Default)]
pub(crate) struct Hashing {
    /// Locked while hashes are taken: whoever else asks waits for them.
    last: Mutex<Option<Last>>,
}

struct Last {
    hashes: Hashes,
    until: Instant,
}

impl Hashing {
    /// Those of the current version.
    pub(crate) async fn hashes(&self, job: &Arc<Job>, deadline: Instant) -> Result<Hashes, Fault> {
        let mut last = timeout_at(deadline, self.last.lock()).await.map_err(|_| late())?;
        if let Some(Last { hashes, until }) = last.as_ref().filter(|last| last.until > Instant::now()) {
            if hashes.info.version == job.progress().version {
                return Ok(hashes.clone());
            }
            sleep_until(deadline.min(*until)).await;
        }
        let (job, begun) = (Arc::clone(job), Instant::now());
        let (info, blocks) =
            spawn_blocking(move || job.state_hashes(deadline.into_std())).await.map_err(defect)??;
        let hashes = Hashes { info, blocks: Arc::new(blocks) };
        let rest = (begun.elapsed() * REST).min(LONGEST_REST);
        *last = Some(Last { hashes: hashes.clone(), until: Instant::now() + rest });
        Ok(hashes)
    }
}

fn late() -> Fault {
    let remedy = "others have asked for it, too: try again later";
    Fault::new(FaultKind::Deadline, "state_hash", "not there", "there in time", remedy)
}

fn defect(error: tokio::task::JoinError) -> Fault {
    Fault::new(FaultKind::Internal, "task", error, "finished", "see the server's log; this is a defect")
}
