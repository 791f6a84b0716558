//! An operator's command that moves a job without ranks, as `longshore scale` does. Ranks may start before the command
//! ends.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use longshore_engine::step::Wanted;
use longshore_proto::Rank;
use longshore_worker::{Session, error::Result, pipeline::move_idle};

use crate::{
    Cluster,
    host::{OUTSIDE, ProcessId, lock},
    rank::options,
};

impl Cluster {
    /// Ends all ranks, moves the job, and starts the ranks again.
    pub(crate) async fn move_idle(self: &Arc<Self>) {
        let sim = &self.sim;
        if self.is_resizing.load(Relaxed) || self.is_idle.swap(true, Relaxed) {
            return;
        }
        let processes = (0..self.world_size()).map(|rank| self.newest(rank)).collect();
        let stopped = self.end_ranks(processes, 4);
        // Incarnations tell processes of a rank apart only if at least `apart` lies between their starts.
        sim.sleep(self.apart() + Duration::from_millis(50)).await;
        for _ in 0..1 + sim.below(2) {
            let wanted = self.scale();
            let operator = self.start_operator(wanted);
            let most = Duration::from_millis([100, 400, 5000][sim.below(3) as usize]);
            let time = self.apart() + sim.part_of(most);
            sim.sleep(time).await;
            // A server may answer a new placement only after its drive has that. A restart shows an answer that came
            // earlier.
            if self.has_drives() && sim.one_in(3) {
                let server = sim.below(self.disks.len() as u64) as usize;
                self.restart_server(server, Duration::from_millis(20)).await;
            }
            if sim.one_in(2) {
                sim.note(operator, || "is killed".into());
                sim.kill(operator);
            }
        }
        if sim.one_in(2) {
            self.world_size.store(1 + sim.below(self.most_ranks() as u64) as usize, Relaxed);
        }
        self.is_idle.store(false, Relaxed);
        sim.note(OUTSIDE, || "ranks start again".into());
        (0..self.world_size()).for_each(|rank| self.start_rank(rank));
        let time = sim.part_of(self.plan.longest);
        sim.sleep(time).await;
        stopped.into_iter().for_each(|process| sim.stop(process, false));
    }

    fn start_operator(self: &Arc<Self>, wanted: Wanted) -> ProcessId {
        let id = self.sim.process("operator", self.skew());
        lock(&self.operators).push(id);
        let cluster = Arc::clone(self);
        self.sim.main(id, move || {
            let Ok(ended) = catch_unwind(AssertUnwindSafe(|| cluster.operate(&wanted))) else {
                return cluster.oracle.fail("an operator panics".into());
            };
            if !cluster.sim.is_dead(id) {
                cluster.sim.note(id, || format!("ends: {:?}", ended.map_err(|error| error.to_string())));
            }
        });
        id
    }

    fn operate(&self, wanted: &Wanted) -> Result<()> {
        let options = options(self, self.members(), Rank(0), self.world_size() as u32);
        move_idle(&Session::connect(options)?, &wanted.servers, wanted.tier, wanted.asked_micros)
    }
}
