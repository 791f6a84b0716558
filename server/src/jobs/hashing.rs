//! State hashes, computed once for all concurrent callers. Each block of a version is hashed once. Between hashings for
//! many callers there is a pause, so hashing takes a small part of the time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use longshore_engine::job::{Job, SnapshotInfo};
use longshore_proto::{BlockId, Fault, FaultKind, Version, checksum::BlockHash};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep_until, timeout_at},
};

use crate::tasks::blocking;

/// Length of the pause between hashings for many callers, as a multiple of the last hashing's duration.
const REST: u32 = 9;
/// Longest pause between hashings, since an operator may be among the callers.
const LONGEST_REST: Duration = Duration::from_secs(2);
/// Largest number of concurrent callers that are served without a pause. People are rarely more than 4.
const FEW: usize = 4;

/// Block hashes of one version of a job, in owned order.
#[derive(Clone)]
pub(crate) struct Hashes {
    pub(crate) info: SnapshotInfo,
    pub(crate) blocks: Arc<Vec<(BlockId, BlockHash)>>,
}

#[derive(Default)]
pub(crate) struct Hashing {
    /// Locked during hashing, also once the caller has gone, so that concurrent callers wait for the result.
    last: Arc<Mutex<Option<Last>>>,
    asking: AtomicUsize,
}

/// Guard that counts a caller during its request.
struct Asking<'a>(&'a AtomicUsize);

impl<'a> Asking<'a> {
    fn count(asking: &'a AtomicUsize) -> Asking<'a> {
        asking.fetch_add(1, Ordering::Relaxed);
        Asking(asking)
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Last {
    hashes: Hashes,
    taken: Instant,
    until: Instant,
}

impl Hashing {
    pub(crate) async fn hashes(&self, job: &Arc<Job>, deadline: Instant) -> Result<Hashes, Fault> {
        let (hashed, late) = (Arc::clone(job), deadline.into_std());
        let take = move || {
            let (info, blocks) = hashed.state_hashes(late)?;
            Ok(Hashes { info, blocks: Arc::new(blocks) })
        };
        self.shared(deadline, || job.progress().version, take).await
    }

    async fn shared(
        &self,
        deadline: Instant,
        current: impl Fn() -> Version,
        take: impl FnOnce() -> Result<Hashes, Fault> + Send + 'static,
    ) -> Result<Hashes, Fault> {
        let (_asking, asked) = (Asking::count(&self.asking), Instant::now());
        let lock = Arc::clone(&self.last).lock_owned();
        let mut last = timeout_at(deadline, lock).await.map_err(|_| late())?;
        let is_new = |last: &&Last| last.taken >= asked || last.until > Instant::now();
        if let Some(Last { hashes, until, .. }) = last.as_ref().filter(is_new) {
            if hashes.info.version == current() {
                return Ok(hashes.clone());
            }
            if self.asking.load(Ordering::Relaxed) > FEW {
                sleep_until(deadline.min(*until)).await;
            }
        }
        let hash = move || {
            let begun = Instant::now();
            let hashes = take()?;
            let taken = Instant::now();
            let rest = ((taken - begun) * REST).min(LONGEST_REST);
            *last = Some(Last { hashes: hashes.clone(), taken, until: taken + rest });
            Ok(hashes)
        };
        blocking(hash).await
    }
}

fn late() -> Fault {
    let remedy = "others have asked for it, too: try again later";
    Fault::new(FaultKind::Deadline, "state_hash", "not there", "there in time", remedy)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// Returns a hashing function that counts its calls and waits for `word`.
    fn slow(taken: Arc<AtomicUsize>, word: Receiver<()>) -> impl FnOnce() -> Result<Hashes, Fault> {
        move || {
            let version = Version(taken.fetch_add(1, Ordering::SeqCst) as u64);
            word.recv_timeout(Duration::from_secs(20)).expect("a word");
            let info = SnapshotInfo { version, applied: 0, commit: None };
            Ok(Hashes { info, blocks: Arc::default() })
        }
    }

    #[test]
    fn all_who_ask_for_a_version_share_its_hashes() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let (hashing, taken) = (Hashing::default(), Arc::new(AtomicUsize::new(0)));
            let soon = Instant::now() + Duration::from_secs(20);
            let (words, askers): (Vec<_>, Vec<_>) = (0..20)
                .map(|_| {
                    let (say, word) = channel();
                    (say, hashing.shared(soon, || Version(0), slow(taken.clone(), word)))
                })
                .unzip();
            let say = async {
                while taken.load(Ordering::SeqCst) == 0 {
                    tokio::task::yield_now().await;
                }
                words.iter().for_each(|say| say.send(()).unwrap_or_default());
            };
            let (found, ()) = tokio::join!(futures_util::future::join_all(askers), say);
            assert!(
                found
                    .iter()
                    .all(|hashes| hashes.as_ref().is_ok_and(|found| found.info.version == Version(0)))
            );
            assert_eq!(taken.load(Ordering::SeqCst), 1, "hashed again for each of them");
            // The next version has hashes of its own.
            let (say, word) = channel();
            say.send(()).expect("somebody who listens");
            let next = hashing.shared(soon, || Version(1), slow(taken, word)).await.expect("hashes");
            assert_eq!(next.info.version, Version(1));
        });
    }

    #[tokio::test]
    async fn a_caller_that_gives_up_leaves_its_hash_to_the_next() {
        let (hashing, taken) = (Arc::new(Hashing::default()), Arc::new(AtomicUsize::new(0)));
        let soon = Instant::now() + Duration::from_secs(20);
        let (say, word) = channel();
        let ask = |deadline: Instant, word: Receiver<()>| {
            let (hashing, take) = (Arc::clone(&hashing), slow(Arc::clone(&taken), word));
            async move { hashing.shared(deadline, || Version(0), take).await }
        };
        let first = tokio::spawn(ask(soon, word));
        while taken.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        first.abort();
        assert!(first.await.is_err());
        let late = ask(Instant::now(), channel().1).await.err();
        assert_eq!(
            late.map(|fault| fault.kind),
            Some(FaultKind::Deadline),
            "no second hash beside the first"
        );
        let mut next = std::pin::pin!(ask(soon, channel().1));
        tokio::select! {
            biased;
            _ = next.as_mut() => panic!("the first hash goes on"),
            () = std::future::ready(()) => {}
        }
        say.send(()).expect("the first hash goes on");
        assert!(next.await.is_ok());
        assert_eq!(taken.load(Ordering::SeqCst), 1);
    }
}
