//! Restores of one job, one at a time. A caller of the restore in progress joins it instead of being refused. So
//! after a lost answer or an early deadline a client simply calls again.

use std::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use longshore_engine::checkpoint::RestoreInfo;
use longshore_proto::{Fault, FaultKind};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

use crate::lock::lock;

/// Stage of a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Verify,
    Hold,
    Start,
}

/// A stage of the restore from one checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Act {
    pub(crate) checkpoint: String,
    pub(crate) stage: Stage,
}

type Outcome = Option<Result<RestoreInfo, Fault>>;

struct Run {
    act: Act,
    outcome: watch::Receiver<Outcome>,
}

impl Run {
    fn is_under_way(&self) -> bool {
        self.outcome.borrow().is_none() && self.outcome.has_changed().is_ok()
    }
}

#[derive(Default)]
pub(crate) struct Restores {
    last: Mutex<Option<Run>>,
    begun: AtomicU64,
}

/// Outcome that a caller waits for.
enum Turn {
    /// The caller's own act, begun by this call or by an earlier call.
    Mine(watch::Receiver<Outcome>),
    /// Another act on the same checkpoint, which must end first.
    Before(watch::Receiver<Outcome>),
}

impl Restores {
    /// Runs `work` on a blocking thread, or joins the equal act in progress, and waits for its end. The work
    /// continues after `deadline`.
    pub(crate) async fn run(
        &self,
        act: Act,
        deadline: Instant,
        work: impl FnOnce() -> Result<RestoreInfo, Fault> + Send + 'static,
    ) -> Result<RestoreInfo, Fault> {
        let mut work = Some(work);
        loop {
            match self.turn(&act, &mut work)? {
                Turn::Mine(outcome) => {
                    return wait(&act, outcome, deadline).await?.unwrap_or_else(|| Err(lost()));
                }
                Turn::Before(outcome) => _ = wait(&act, outcome, deadline).await?,
            }
        }
    }

    /// Waits until no restore is in progress.
    pub(crate) async fn end(&self, act: &Act, deadline: Instant) -> Result<(), Fault> {
        let under_way = {
            let last = lock(&self.last);
            last.as_ref().filter(|run| run.is_under_way()).map(|run| run.outcome.clone())
        };
        match under_way {
            Some(outcome) => wait(act, outcome, deadline).await.map(|_| ()),
            None => Ok(()),
        }
    }

    fn turn<Begin>(&self, act: &Act, work: &mut Option<Begin>) -> Result<Turn, Fault>
    where
        Begin: FnOnce() -> Result<RestoreInfo, Fault> + Send + 'static,
    {
        let mut last = lock(&self.last);
        if let Some(run) = last.as_ref().filter(|run| run.is_under_way()) {
            if run.act == *act {
                return Ok(Turn::Mine(run.outcome.clone()));
            }
            if run.act.checkpoint == act.checkpoint {
                return Ok(Turn::Before(run.outcome.clone()));
            }
            return Err(busy(&run.act));
        }
        let work = work.take().ok_or_else(lost)?;
        let (done, outcome) = watch::channel(None);
        tokio::task::spawn_blocking(move || done.send_replace(Some(work())));
        *last = Some(Run { act: act.clone(), outcome: outcome.clone() });
        self.begun.fetch_add(1, Relaxed);
        Ok(Turn::Mine(outcome))
    }

    /// Returns the number of restores begun, and whether one is in progress.
    pub(super) fn begun(&self) -> (u64, bool) {
        let under_way = lock(&self.last).as_ref().is_some_and(Run::is_under_way);
        (self.begun.load(Relaxed), under_way)
    }
}

/// Waits for an act's outcome. None if its thread has panicked.
async fn wait(act: &Act, mut outcome: watch::Receiver<Outcome>, deadline: Instant) -> Result<Outcome, Fault> {
    match timeout_at(deadline, outcome.wait_for(Option::is_some)).await {
        Ok(outcome) => Ok(outcome.ok().and_then(|outcome| outcome.clone())),
        Err(_) => Err(late(act)),
    }
}

fn late(act: &Act) -> Fault {
    let value = format!("{}, being read", act.checkpoint);
    let remedy = "ask again, and the call goes on waiting; Admin.Describe counts the shards loaded";
    Fault::new(FaultKind::Deadline, "restore", value, "done in time", remedy)
}

fn busy(other: &Act) -> Fault {
    let value = format!("of checkpoint {}, under way", other.checkpoint);
    let remedy = "wait for its end, or give it up with RESTORE_MODE_RELEASE";
    Fault::new(FaultKind::Precondition, "restore", value, "the only one of its job", remedy)
}

fn lost() -> Fault {
    let remedy = "see the server's log; this is a defect";
    Fault::new(FaultKind::Internal, "restore", "without a result", "finished", remedy)
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use longshore_engine::job::StoredImages;
    use longshore_proto::Version;

    use super::*;

    fn act(checkpoint: &str, stage: Stage) -> Act {
        Act { checkpoint: checkpoint.to_string(), stage }
    }

    fn info(version: u64) -> RestoreInfo {
        RestoreInfo {
            version: Version(version),
            applied: version,
            commit: None,
            state_hash: None,
            images: StoredImages::None,
            id: String::new(),
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn who_asks_again_joins_what_is_under_way_and_others_are_refused_or_wait_their_turn() {
        let restores = Restores::default();
        let soon = || Instant::now() + Duration::from_secs(20);
        let (go, gate) = mpsc::channel::<()>();
        let held = move || {
            gate.recv().expect("the word to go on");
            Ok(info(7))
        };
        let never = || panic!("it is done already");
        let hold = act("a", Stage::Hold);
        let late = restores.run(hold.clone(), Instant::now(), held).await.expect_err("it waits for the word");
        assert_eq!((late.kind, &*late.field), (FaultKind::Deadline, "restore"));
        let busy = restores.run(act("b", Stage::Hold), soon(), never).await.expect_err("another one");
        assert_eq!((busy.kind, &*busy.field), (FaultKind::Precondition, "restore"));
        assert_eq!(restores.begun(), (1, true));
        let again = restores.run(hold, soon(), never);
        let start = restores.run(act("a", Stage::Start), soon(), || Ok(info(8)));
        // The act continues only after both have called: a finished act cannot be joined.
        let word = async { go.send(()).expect("the one that waits") };
        let (again, start, ()) = tokio::join!(again, start, word);
        assert_eq!(
            (again.expect("joined").version, start.expect("after it").version),
            (Version(7), Version(8))
        );
        restores.end(&act("a", Stage::Hold), soon()).await.expect("nothing is under way");
        assert_eq!(restores.begun(), (2, false));
    }
}
