//! A rank's process: the worker library as a trainer uses it.

use std::{sync::Arc, time::Duration};

use longshore_proto::{Hyper, Rank, ShardId, Step};
use longshore_worker::{
    DelayCorrection, Error, LossScaler, Options, Pipeline, PipelineOptions, Session, Transport,
    error::Result, session::Process,
};

use crate::{Cluster, host::ProcessId, oracle::number};

pub(crate) fn options(cluster: &Cluster, servers: Vec<String>, rank: Rank, world_size: u32) -> Options {
    Options {
        transport: Transport::Tcp,
        connections: 1,
        deadline: Duration::from_secs(20),
        slow_deadline: Duration::from_secs(120),
        process: Process::default(),
        world_size,
        ..Options::new(servers, (*cluster.oracle.spec).clone(), rank)
    }
}

/// Trains to the last step, as one of `world_size` ranks, from the `servers` that the launcher names.
pub(crate) fn run(
    cluster: &Arc<Cluster>,
    servers: &[String],
    (rank, world_size): (usize, u32),
    id: ProcessId,
) -> Result<()> {
    let options = options(cluster, servers.to_vec(), Rank(rank as u32), world_size);
    loop {
        match train(cluster, options.clone(), id) {
            Err(error @ Error::Outdated(_)) => cluster.outdated(rank, id, &error),
            ended => return ended,
        }
    }
}

fn train(cluster: &Cluster, options: Options, id: ProcessId) -> Result<()> {
    let (rank, world_size) = (options.rank, options.world_size);
    let mut session = Session::connect(options)?;
    let joined = if rank == Rank(0) {
        session.open()?;
        session.join()?
    } else {
        session.follow(None)?
    };
    cluster.has_joined(rank, &joined);
    if rank == Rank(0) {
        cluster.oracle.leads(joined.incarnation, world_size);
    }
    let options = PipelineOptions {
        schedule: cluster.oracle.schedule.clone(),
        correction: DelayCorrection::None,
        ..PipelineOptions::new(LossScaler::fixed(1.0)?, |_| vec![Hyper::default()])
    };
    let mut pipeline = Pipeline::new(session, &joined, options)?;
    train_to(cluster, &mut pipeline, (rank.0, world_size, id))
        .map_err(|error| pipeline.session().cause(error))?;
    pipeline.close()?.leave()
}

fn train_to(cluster: &Cluster, pipeline: &mut Pipeline, rank: (u32, u32, ProcessId)) -> Result<()> {
    let oracle = &cluster.oracle;
    let shards = oracle.layout.shards();
    while pipeline.last_step().0 < cluster.steps() {
        let plan = pipeline.begin()?;
        let weights = pipeline.weights()?;
        let mut read = Vec::new();
        for shard in (0..shards).map(ShardId) {
            let range = oracle.layout.shard_range(shard);
            let mut bytes = vec![0; 2 * (range.end - range.start) as usize];
            weights.read_raw(range, &mut bytes)?;
            read.push(number(&bytes));
        }
        for micro_step in 0..oracle.spec.micro_steps {
            cluster.sim.work(rank.2, cluster.plan.backward);
            let gradients = oracle.compute(rank, (plan.step, micro_step), plan.reads, &read);
            let mut assembler = pipeline.assembler(micro_step)?;
            for shard in (0..shards).rev().map(ShardId) {
                let payload = oracle.payload(shard, gradients[shard.index()]);
                let elements = oracle.layout.shard_len(shard);
                assembler.put_with(shard.index(), elements, &mut |range, target| {
                    target.copy_from_slice(&payload[2 * range.start..2 * range.end]);
                })?;
            }
            assembler.finish()?;
        }
        drop(weights);
        pipeline.finish(Vec::new())?;
    }
    let version = pipeline.settle()?;
    debug_assert_eq!(Step(version.0), Step(cluster.steps()));
    Ok(())
}

/// Returns true if a newer process has taken the rank.
pub(crate) fn is_fenced(error: &Error) -> bool {
    matches!(error, Error::Fenced(_))
}
