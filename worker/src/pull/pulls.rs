//! What all pulls of a session share: the servers, their memory where they share it, and host memory for what arrives.

use std::sync::Arc;

use crate::{cluster::Cluster, device::BufferPool, meter::Meter, rank::RankState};

pub(crate) struct Pulls {
    pub(super) cluster: Arc<Cluster>,
    pub(super) rank: Arc<RankState>,
    pub(super) pool: BufferPool,
    pub(crate) meter: Meter,
}

impl Pulls {
    pub(crate) fn new(cluster: Arc<Cluster>, rank: Arc<RankState>) -> Pulls {
        let pool = BufferPool::new(cluster.options.host_budget.clone(), "weights under way");
        Pulls { cluster, rank, pool, meter: Meter::default() }
    }

    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }
}
