//! Deadlines of a session's calls that begin while a server recovers the job, or that take long for another
//! reason.

use std::{
    collections::VecDeque,
    io::Write,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use longshore_proto::{Dtype, FaultKind, ServerId, Version, fault::ORIGIN};
use longshore_wire::{
    Author,
    v1::{DescribeResponse, JobProgress, OpenJobResponse, Phase, ResumeResponse},
};

use super::{Session, checkpoints, export, join, resume};
use crate::{
    cluster::fake_for_tests::{Answer, DEADLINE, Says, cluster, says, start},
    error::{Error, Result},
    export::Contents,
    rank::RankState,
};

/// The duration of a server's recovery: longer than any deadline.
const RECOVERY: Duration = DEADLINE.saturating_mul(3);

/// A line of a server's script, for calls of one kind.
#[derive(Clone, Copy)]
enum Line {
    At(u64),
    /// The server recovers the job for [`RECOVERY`], from the first such call on.
    Recovers,
    /// The server has lost the version that this process read.
    Outdated,
}

use Line::{At, Outdated, Recovers};

/// A server that answers `Join` by a script. After the script, and for other calls, it is at version 1.
fn joined_by(script: impl IntoIterator<Item = Line>) -> Says {
    let left = Mutex::new((script.into_iter().collect::<VecDeque<_>>(), None));
    says(move |call| {
        if call != "Join" {
            return Answer::described(1);
        }
        let (lines, since) = &mut *left.lock().unwrap();
        if matches!(lines.front(), Some(Recovers)) {
            if since.get_or_insert_with(Instant::now).elapsed() < RECOVERY {
                return Answer::recovering();
            }
            lines.pop_front();
        }
        match lines.pop_front() {
            Some(Outdated) => Answer::fault(FaultKind::Conflict, ORIGIN),
            Some(At(version)) => Answer::joined(version),
            _ => Answer::joined(1),
        }
    })
}

fn join_with(script: &[Line]) -> Result<join::Joined> {
    let (cluster, _runtime) = cluster(vec![joined_by(script.iter().copied()), joined_by([])]);
    cluster.runtime.block_on(join::join(&cluster, &RankState::new(&cluster), false))
}

/// Rank 0 joins each server twice, first to fence an older process. A server that dies in between may come back
/// with an older version, and is brought to the newest.
#[test]
fn versions_have_time_to_meet_after_a_recovery() {
    let cases: [&[Line]; 2] =
        [&[At(1), Recovers, At(0)], &[At(1), At(0), At(1), Recovers, At(0), At(1), At(1)]];
    for script in cases {
        let joined = join_with(script).unwrap();
        assert_eq!(joined.version, Version(1));
    }
}

#[test]
fn a_rank_joins_again_after_a_recovery() {
    let joined = join_with(&[Recovers, At(1), Outdated]).unwrap();
    assert_eq!(joined.version, Version(1));
}

/// The server dies between the opening of a new job and its join, and forgets the job.
#[test]
fn a_new_job_is_opened_again_where_a_server_lost_it() {
    let join = |is_new| {
        let opened = AtomicBool::new(false);
        let (cluster, _runtime) = cluster(vec![says(move |call| match (call, opened.load(Relaxed)) {
            ("OpenJob", _) => {
                opened.store(true, Relaxed);
                Answer::new(&OpenJobResponse::default())
            }
            (_, false) => Answer::fault(FaultKind::NotFound, "job"),
            ("Join", true) => Answer::joined(0),
            (_, true) => Answer::described(0),
        })]);
        cluster.runtime.block_on(join::join(&cluster, &RankState::new(&cluster), is_new))
    };
    assert_eq!(join(true).unwrap().version, Version(0));
    assert!(matches!(join(false), Err(Error::StateLost(_))));
}

#[test]
fn a_resume_waits_for_the_version_after_a_recovery() {
    let (since, behind) = (Mutex::new(None::<Instant>), Mutex::new(true));
    let (cluster, _runtime) = cluster(vec![says(move |_| {
        if since.lock().unwrap().get_or_insert_with(Instant::now).elapsed() < RECOVERY {
            return Answer::recovering();
        }
        match std::mem::take(&mut *behind.lock().unwrap()) {
            true => Answer::fault(FaultKind::Precondition, "version"),
            false => Answer::new(&ResumeResponse::default()),
        }
    })]);
    let resumed = resume::resume_on(&cluster, ServerId(0), Some(Version(1)), 0.0);
    cluster.runtime.block_on(resumed).unwrap();
}

/// An identity of role worker may not resume. The operator's command is repeated.
#[test]
fn a_rank_that_may_not_resume_waits_for_the_operator() {
    let asked = AtomicBool::new(false);
    let (cluster, _runtime) = cluster(vec![says(move |call| match (call, asked.load(Relaxed)) {
        ("Resume", _) => {
            asked.store(true, Relaxed);
            Answer::fault(FaultKind::Forbidden, "identity")
        }
        (_, true) => Answer::described(1),
        (_, false) => {
            let progress = JobProgress { phase: Phase::Paused.into(), version: 1, ..Default::default() };
            Answer::new(&DescribeResponse { progress: Some(progress), ..Default::default() })
        }
    })]);
    cluster.runtime.block_on(resume::spread_on(&cluster, ServerId(0), Version(1), 0.0)).unwrap();
}

/// Every try begins with the first byte: behind a link that cuts streams, tries would follow each other for ever.
#[test]
fn an_export_that_always_breaks_ends() {
    let (mut cluster, _runtime) = cluster(vec![says(|call| match call {
        "Export" => Answer::fault(FaultKind::Unavailable, "stream").after(DEADLINE * 2),
        _ => Answer::new(&DescribeResponse::default()),
    })]);
    cluster.options.slow_deadline = DEADLINE * 6;
    let exported = export::export(&cluster, Contents::Weights(Dtype::Bf16), &|_, _, _| Ok(()));
    let ended = async { Ok(tokio::time::timeout(Duration::from_secs(30), exported).await) };
    let Ok(Err(Error::Call(failed))) = cluster.runtime.block_on(ended).unwrap() else {
        panic!("it went on, or ended otherwise")
    };
    assert_eq!(failed.fault.field, "stream", "{failed}");
}

/// The logged text.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A server touches all of its memory before a job is open, which takes longer than a session's deadline.
#[test]
fn a_rank_that_opens_a_job_says_how_long_it_waits_at_most() {
    let (options, _runtime) = start(vec![says(|call| match call {
        "OpenJob" => Answer::new(&OpenJobResponse::default()).after(Duration::from_secs(7)),
        _ => Answer::fault(FaultKind::NotFound, "job"),
    })]);
    assert_eq!((options.deadline.as_secs(), options.slow_deadline.as_secs()), (60, 1800));
    let session = Session::connect(options).unwrap();
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(subscriber, || session.open()).unwrap();
    let said = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(
        said.contains("still waiting for the job on all servers") && said.contains("of at most 1800 s"),
        "{said}"
    );
}

#[test]
fn a_failed_checkpoint_is_discarded_on_the_servers_that_answer() {
    let discarded = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&discarded);
    let whole = says(move |call| {
        seen.fetch_or(call == "DiscardCheckpoint", Relaxed);
        Answer::described(1)
    });
    let silent = says(|call| match call {
        "Describe" => Answer::described(1),
        _ => Answer::fault(FaultKind::Unavailable, "server"),
    });
    let (cluster, _runtime) = cluster(vec![whole, silent]);
    let written = cluster.runtime.block_on(checkpoints::checkpoint(&cluster, Author::Unknown, "step"));
    assert!(matches!(written, Err(Error::Call(failed)) if failed.fault.kind == FaultKind::Unavailable));
    assert!(discarded.load(Relaxed));
}
