//! Gives up lost servers of a job with replicas.
//!
//! A task of each session asks all servers for losses: every second on rank 0, every five seconds elsewhere. Operators
//! report losses to servers. Rank 0 gives up restarted servers without the job, and silent servers while most servers
//! answer. A minority never gives up other servers. Otherwise both sides of a broken link would go on, each without the
//! other side.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use futures_util::future::{join, join_all};
use longshore_proto::{Fault, Incarnation, Rank, ServerId};
use longshore_wire::{
    Wire, fault_from_status,
    v1::{DescribeResponse, Phase, RetireRequest, ScaleRequest},
};
use tonic::Status;

use super::{
    Cluster, Peer,
    call::FORGOTTEN,
    members::{GLANCE, Seen},
};
use crate::{
    error::{Error, Result},
    host::{self, Instant},
};

/// Period of looks on rank 0.
pub(super) const LOOK: Duration = Duration::from_secs(1);
/// Period of looks on another rank.
const HEAR: Duration = Duration::from_secs(5);

/// A member's answer to one look.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Answer {
    /// The server holds state of the job.
    Filled,
    /// The server waits for weights.
    Loading,
    /// The server was restarted, and lacks the job.
    Forgetful,
    Silent,
    SilentForLong,
}

impl Answer {
    pub(super) fn of(seen: &Result<Option<Seen>, Fault>) -> Answer {
        match seen {
            Ok(Some(seen)) if seen.is_loading => Answer::Loading,
            Ok(Some(_)) => Answer::Filled,
            Ok(None) => Answer::Forgetful,
            Err(_) => Answer::Silent,
        }
    }
}

/// Returns the servers to give up. Empty while a server may still answer or waits for weights. Silent servers are
/// given up only if most of the `members` answer.
fn lost(answers: &[(ServerId, Answer)], members: usize) -> Vec<ServerId> {
    let count = |of: Answer| answers.iter().filter(|(_, answer)| *answer == of).count();
    let (filled, silent) = (count(Answer::Filled), count(Answer::SilentForLong));
    let may_change = count(Answer::Silent) + count(Answer::Loading) > 0;
    if may_change || filled == 0 || silent > 0 && 2 * filled <= members {
        return Vec::new();
    }
    let lost = answers.iter().filter(|(_, answer)| *answer != Answer::Filled);
    lost.map(|(server, _)| *server).collect()
}

impl Cluster {
    /// Time without an answer after which rank 0 gives a server up. A rank's wait is three times as long, so it
    /// outlasts the decision.
    pub(super) fn silence(&self) -> Duration {
        self.options.deadline / 3
    }

    /// Finds the lost servers in `answers`, and reports them to all servers with state. If any server refuses, as for
    /// the last holder of a shard, no server is given up. Returns the lost servers.
    pub(super) async fn say_lost(
        &self,
        answers: &[(ServerId, Answer)],
        members: &BTreeMap<ServerId, String>,
        peers: &BTreeMap<ServerId, Peer>,
    ) -> Vec<ServerId> {
        let lost = lost(answers, members.len());
        let filled = answers.iter().filter(|(_, answer)| *answer == Answer::Filled);
        let told: Vec<&Peer> = filled.filter_map(|(server, _)| peers.get(server)).collect();
        let numbers: Vec<u32> = lost.iter().map(|server| server.0).collect();
        for check in [true, false] {
            if lost.is_empty() {
                break;
            }
            let request = ScaleRequest {
                job: self.job().to_string(),
                lost: numbers.clone(),
                check,
                ..Default::default()
            };
            let told = told.iter().map(async |peer| {
                let tell = || host::timeout(GLANCE, async { peer.admin().scale(request.clone()).await });
                let told = match tell().await {
                    Ok(told) => told,
                    // A single late answer must not postpone the loss. A second attempt delays the ranks by two looks
                    // at most.
                    Err(_) => tell().await.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer"))),
                };
                told.map_err(|status| fault_from_status(&status, &peer.address))
            });
            if let Some(fault) = join_all(told).await.into_iter().find_map(Result::err) {
                if self.waits.is_turn_to_tell() {
                    tracing::warn!(job = %self.job(), ?lost, %fault, "lost servers are not given up yet");
                }
                return Vec::new();
            }
        }
        for server in &lost {
            let reason = match answers.iter().find(|(of, _)| of == server) {
                Some((_, Answer::Forgetful)) => "was started again and holds nothing of the job",
                _ => "is silent, and most servers answer",
            };
            tracing::warn!(job = %self.job(), server = members.get(server), reason, "given up as lost");
        }
        lost
    }

    /// Ends the job on a server that has left the job, or was given up. Returns false if the call failed.
    pub(crate) async fn retire(&self, server: ServerId, incarnation: Incarnation, time: Duration) -> bool {
        let placement = Some(self.placement().to_wire());
        let request = RetireRequest { job: self.job().to_string(), incarnation: incarnation.0, placement };
        let retired = self.call_for(server, "Retire", None, (time, Duration::ZERO), |peer| {
            let request = request.clone();
            async move { peer.training().retire(request).await }
        });
        let retired = retired.await;
        if let Err(error) = &retired {
            tracing::info!(server = self.address(server), %error, "the job was not ended there");
        }
        retired.is_ok()
    }

    /// Ends the job on a lost server that runs again. Returns true once the server holds no shards under its lost
    /// number.
    async fn end_lost(&self, server: ServerId) -> bool {
        match self.glance(server).await {
            // The server still holds shards under its lost number: it was only silent while the job went on.
            Ok(answer) if answer.server == server.0 => {
                self.retire(server, Incarnation(self.incarnation.load(Relaxed)), GLANCE).await
            }
            // The job has taken the server back, under another number.
            Ok(_) => true,
            Err(error) => matches!(error, Error::StateLost(_)),
        }
    }
}

/// Looks at all servers until the session ends, in a task on the session's runtime.
pub(crate) struct Losses {
    cluster: Arc<Cluster>,
    silent: BTreeMap<ServerId, Instant>,
    looked: Instant,
    /// Servers that this process has given up. The job takes them back once they run again.
    gone: BTreeSet<ServerId>,
    /// Lost servers that run again and hold nothing of the job.
    ended: BTreeSet<ServerId>,
}

impl Losses {
    pub(crate) fn new(cluster: Arc<Cluster>) -> Losses {
        let (silent, gone, ended) = Default::default();
        Losses { cluster, silent, looked: Instant::now(), gone, ended }
    }

    pub(crate) async fn watch(mut self) {
        let pause = if self.cluster.options.rank == Rank(0) { LOOK } else { HEAR };
        loop {
            host::sleep(pause).await;
            self.look().await;
        }
    }

    /// Asks all servers for losses. On rank 0, gives up lost servers.
    pub(crate) async fn look(&mut self) {
        let Losses { cluster, silent, looked, gone, ended } = self;
        let mut removed = cluster.lost();
        removed.retain(|server| {
            let is_member = cluster.placement().members().any(|member| member == *server);
            cluster.options.rank == Rank(0) && !is_member && !ended.contains(server)
        });
        // Lost servers are asked together with the others, so that a look takes only one wait.
        let end_lost = removed.iter().map(|&server| cluster.end_lost(server));
        let (answers, have_ended) = join(cluster.hear_of_losses(), join_all(end_lost)).await;
        let mut leading = answers.values().flatten().filter_map(|answer| answer.ranks.first());
        let is_replaced = leading.any(|rank| cluster.options.process.is_replaced_by(rank.incarnation));
        // An earlier process of rank 0 has links of its own, and must not judge servers for its successor.
        if cluster.options.rank != Rank(0) || is_replaced || cluster.waits.check().is_err() {
            return;
        }
        for (server, _) in removed.into_iter().zip(have_ended).filter(|(_, has_ended)| *has_ended) {
            ended.insert(server);
            if gone.contains(&server) {
                cluster.came_back();
            }
        }
        let now = Instant::now();
        if now.duration_since(*looked) > 2 * (LOOK + GLANCE) {
            // This process was stopped since the last look, so the silence may be its own and not the servers'.
            silent.clear();
        }
        *looked = now;
        let members = cluster.members();
        let mut answer = |server: ServerId| {
            let answer = answers.iter().find(|(of, _)| *of == server).map(|(_, answer)| answer);
            let answer = answer.map_or(Answer::Silent, answer_of);
            if answer != Answer::Silent {
                silent.remove(&server);
            } else if silent.entry(server).or_insert(now).elapsed() >= cluster.silence() {
                return Answer::SilentForLong;
            }
            answer
        };
        let asked = members.keys().copied().filter(|&server| !cluster.has_left(server));
        let answers: Vec<_> = asked.map(|server| (server, answer(server))).collect();
        let peers = cluster.servers().map(|server| (server, cluster.peer(server).clone())).collect();
        let lost = cluster.say_lost(&answers, &members, &peers).await;
        gone.extend(&lost);
        cluster.give_up(&lost);
    }
}

fn answer_of(answer: &Result<DescribeResponse>) -> Answer {
    match answer {
        Ok(answer) => match answer.progress.as_ref().map(|progress| progress.phase()) {
            Some(Phase::Loading) | None => Answer::Loading,
            Some(_) => Answer::Filled,
        },
        Err(Error::StateLost(_)) => Answer::Forgetful,
        Err(Error::Call(failed)) if failed.fault.field == FORGOTTEN => Answer::Forgetful,
        Err(_) => Answer::Silent,
    }
}

#[cfg(test)]
mod tests {
    use super::{Answer::*, *};

    #[test]
    fn only_most_servers_give_up_silent_ones() {
        let lost = |answers: &[Answer], members: usize| {
            let named = (0..).map(ServerId).zip(answers.iter().copied());
            let lost = lost(&named.collect::<Vec<_>>(), members);
            lost.into_iter().map(|server| server.0).collect::<Vec<_>>()
        };
        assert_eq!(lost(&[Filled, SilentForLong, Filled], 3), [1]);
        assert_eq!(lost(&[Filled, Forgetful], 2), [1]);
        assert_eq!(lost(&[Forgetful, Filled, SilentForLong, Filled, Filled], 5), [0, 2]);
        let nothing = [
            (&[Filled, Filled, Filled][..], 3),
            (&[Filled, SilentForLong], 2),
            (&[Filled, SilentForLong, SilentForLong], 3),
            // Members that are given up count as long as they are in the placement.
            (&[Filled, Filled, SilentForLong], 4),
            (&[Filled, Forgetful, SilentForLong], 3),
            (&[Filled, Forgetful, Silent], 3),
            (&[Filled, Forgetful, Loading], 3),
            (&[Forgetful, Forgetful], 2),
        ];
        for (answers, members) in nothing {
            assert_eq!(lost(answers, members), [0; 0], "{answers:?}");
        }
    }
}
