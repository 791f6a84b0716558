//! Joins a server as this rank, and makes the link that the server then offers. Called when a session joins, and
//! after a server's restart.

use longshore_proto::{Fault, FaultKind, Incarnation, ServerId, Version};
use longshore_wire::{
    memfd::STALE,
    v1::{JobProgress, JoinRequest, JoinResponse},
};

use super::{RankState, recover::check_reach};
use crate::{cluster::Cluster, error::Result};

/// Attempts for a required link before the first push. A server may die once or twice, but a host without any
/// possible link should be reported soon.
const TRIES: usize = 3;

/// Fences earlier processes of the rank on one server, without joining it.
pub(crate) async fn fence(
    cluster: &Cluster,
    server: ServerId,
    incarnation: Incarnation,
) -> Result<JobProgress> {
    let request = JoinRequest { fence_only: true, ..request(cluster, incarnation) };
    Ok(join(cluster, server, request).await?.progress.unwrap_or_default())
}

fn request(cluster: &Cluster, incarnation: Incarnation) -> JoinRequest {
    JoinRequest {
        job: cluster.job().to_string(),
        rank: cluster.options.rank.0,
        incarnation: incarnation.0,
        fence_only: false,
        world_size: cluster.options.world_size,
        moved: cluster.moved(),
    }
}

async fn join(cluster: &Cluster, server: ServerId, request: JoinRequest) -> Result<JoinResponse> {
    let answer = cluster.call(server, "Join", None, cluster.options.deadline, |peer| {
        let request = request.clone();
        async move { peer.training().join(request).await }
    });
    let answer = answer.await?;
    cluster.keeps(server, answer.tier);
    Ok(answer)
}

impl RankState {
    /// Joins as `join_on` does, except that rank 0 keeps the job's world size. Fails with `Outdated` if a step was
    /// decided since this incarnation joined.
    pub(crate) async fn join_first(
        &self,
        cluster: &Cluster,
        server: ServerId,
        incarnation: Incarnation,
    ) -> Result<JobProgress> {
        let mut request = request(cluster, incarnation);
        if request.rank == 0 {
            request.world_size = 0;
        }
        let answer = join(cluster, server, request).await?;
        self.offered(server, answer.memfd);
        let (progress, joined_at) = (answer.progress.unwrap_or_default(), answer.joined_at);
        match joined_at.filter(|&at| at < progress.version) {
            None => Ok(progress),
            Some(at) => {
                let limit = format!("{at}, at which this incarnation joined");
                let remedy = "the rank joins with another incarnation";
                let fault = Fault::new(FaultKind::Conflict, "version", progress.version, limit, remedy);
                Err(cluster.outdated(server, fault))
            }
        }
    }

    /// Binds the rank to this process on one server. The answer includes the server's offer of a link.
    pub(crate) async fn join_on(
        &self,
        cluster: &Cluster,
        server: ServerId,
        incarnation: Incarnation,
    ) -> Result<JobProgress> {
        let answer = join(cluster, server, request(cluster, incarnation)).await?;
        self.offered(server, answer.memfd);
        Ok(answer.progress.unwrap_or_default())
    }

    /// Joins a server again as the same process. A restarted server may have forgotten its ranks, and offers its
    /// link at another address.
    pub(crate) async fn rejoin(&self, cluster: &Cluster, server: ServerId) -> Result<JobProgress> {
        self.join_on(cluster, server, self.incarnation()).await
    }

    /// Makes a link before the first push, if one is possible: the server may have died since it was joined.
    ///
    /// # Errors
    /// The reason why there is no link, if the session requires one. `Outdated` if the server has lost the version
    /// that was joined.
    pub(crate) async fn first_link(&self, cluster: &Cluster, server: ServerId) -> Result<()> {
        for _ in 1..TRIES {
            match self.relink(cluster, server).await {
                // A restarted server offers its link at another address, which its answer to a join contains.
                Err(fault) if fault.field == STALE => match self.rejoin(cluster, server).await {
                    Ok(progress) => check_reach(cluster, self, server, Version(progress.version))?,
                    Err(error) => tracing::debug!(server = cluster.address(server), %error, "no link"),
                },
                other => return other.map_err(|fault| cluster.explain(server, "Link", None, fault)),
            }
        }
        let linked = self.relink(cluster, server).await;
        linked.map_err(|fault| cluster.explain(server, "Link", None, fault))
    }
}
