//! Joins one server as this rank, and makes the link that the server then offers.

use longshore_proto::{Fault, Incarnation, ServerId, Version};
use longshore_wire::{
    memfd::STALE,
    v1::{JobProgress, JoinRequest, JoinResponse},
};

use super::{RankState, recover::check_reach};
use crate::{cluster::Cluster, error::Result};

/// How often a link that a session must have is tried before its first push. A server may die once or twice, but a
/// host on which there can be no link should be reported soon.
const TRIES: usize = 3;

/// Fences earlier processes of the rank on one server, and does not join it otherwise.
pub(crate) async fn fence(
    cluster: &Cluster,
    server: ServerId,
    incarnation: Incarnation,
) -> Result<JobProgress> {
    Ok(join(cluster, server, incarnation, true).await?.progress.unwrap_or_default())
}

async fn join(
    cluster: &Cluster,
    server: ServerId,
    incarnation: Incarnation,
    fence_only: bool,
) -> Result<JoinResponse> {
    let request = JoinRequest {
        job: cluster.job().to_string(),
        rank: cluster.options.rank.0,
        incarnation: incarnation.0,
        fence_only,
    };
    let answer = cluster.call(server, "Join", None, cluster.options.deadline, |peer| {
        let request = request.clone();
        async move { peer.training().join(request).await }
    });
    answer.await
}

impl RankState {
    /// Binds the rank to a process on one server. The server also says where a link can be made.
    pub(crate) async fn join_on(
        &self,
        cluster: &Cluster,
        server: ServerId,
        incarnation: Incarnation,
    ) -> Result<JobProgress> {
        let answer = join(cluster, server, incarnation, false).await?;
        self.links.offered(server, answer.memfd);
        Ok(answer.progress.unwrap_or_default())
    }

    /// Joins a server again as this very process. A server that restarted may have forgotten who had joined, and offers
    /// its link at another address.
    pub(crate) async fn rejoin(&self, cluster: &Cluster, server: ServerId) -> Result<JobProgress> {
        self.join_on(cluster, server, self.incarnation()).await
    }

    /// Makes a link where there can be one, before the first push: the server may have died since it was joined.
    ///
    /// # Errors
    /// Why there is none, if the session was told to have one. `Outdated` where the server has died with the version
    /// that was joined.
    pub(crate) async fn first_link(&self, cluster: &Cluster, server: ServerId) -> Result<()> {
        for _ in 1..TRIES {
            match self.relink(cluster, server).await {
                // A server that restarted offers its link at another address, which it says when it is joined.
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

    /// Makes a link if there can be one and there is none. Lanes call this. They find out by themselves that a server
    /// died, and then try again.
    ///
    /// # Errors
    /// As [`RankState::first_link`].
    pub(crate) async fn relink(&self, cluster: &Cluster, server: ServerId) -> Result<(), Fault> {
        self.links.make(cluster, server, self.incarnation()).await
    }
}
