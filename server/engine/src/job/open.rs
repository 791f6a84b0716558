//! Opening of a job: memory is reserved and allocated, and the state that the tier has kept is recovered.

use std::sync::{Arc, Mutex, atomic::AtomicU64};

use longshore_proto::{Fault, FaultKind, JobSpec, Placement, ServerId, ShardId};

use super::{
    Job, Observer,
    compute::Compute,
    gradients::{Gradients, SpilledGradients},
    images::{Images, Window},
    load::Load,
    protocol::{Protocol, Signal},
    snapshots::Snapshots,
    space::{Buffers, Shape, Space},
};
use crate::{
    admission::{Budget, Need},
    memory::AllocationError,
    step::Machine,
    tier::{self, Durable, Header, Inputs, Opened, Recovered, Storage},
};

impl Job {
    /// Validates and admits the job, and allocates and touches all memory that it will ever need here. If its
    /// tier has kept the job, the job goes on from there.
    pub fn open(
        spec: JobSpec,
        placement: Placement,
        server: ServerId,
        budget: &Budget,
        storage: &Storage,
        compute: Arc<Compute>,
        observer: Observer,
    ) -> Result<Job, Fault> {
        let layout = spec.validate()?;
        placement.validate(layout.shards())?;
        if server.0 as usize >= placement.servers.len() {
            let limit = format!("below {}, the number of servers", placement.servers.len());
            return Err(Fault::invalid("server", server.0, limit, "say which of placement.servers this is"));
        }
        let owned = placement.owned(server);
        let need = Need::of(&spec, &layout, &owned, storage);
        let reservation = budget.reserve(&need)?;
        let shapes = Shape::of(&spec, &layout, &owned);
        let signal = Arc::new(Signal::new(observer));
        let spilled = storage.spills(&spec);
        // A tier that keeps the buffers brings the memory for them.
        let space = (!tier::keeps_buffers(&spec)).then(|| Space::allocate(&spec, &shapes, storage));
        let space = space.transpose().map_err(exhausted)?;
        let inputs =
            Inputs { spec: &spec, layout: &layout, owned: &owned, placement: &placement, server, storage };
        let waker = Arc::clone(&signal);
        let kept_bytes = if space.is_none() { Space::bytes(&spec, &shapes) } else { 0 };
        let opened = tier::open(&inputs, kept_bytes, compute.pool(), Box::new(move || waker.send()))?;
        let Opened { store: mut tier, buffers, recovered } = opened;
        let made = tier.durable.clone().filter(|_| matches!(recovered, Recovered::Nothing));
        let mut unopened = Unopened(made);
        let space = space.or_else(|| Some(Space::of_tier(buffers?, &spec)));
        let space = space.expect("a tier that keeps the buffers gives their memory");
        let Buffers { images, gradients, shared } =
            Buffers::over(space, &spec, &shapes, compute.pool()).map_err(exhausted)?;
        let window = spilled.then(|| Window::allocate(&spec, &layout, &owned, storage, compute.pool()));
        let window = window.transpose().map_err(exhausted)?;
        let length = |&shard: &ShardId| match layout.is_frozen(shard) {
            true => 0,
            false => layout.shard_len(shard) as usize,
        };
        let lengths: Vec<usize> = owned.iter().map(length).collect();
        let image_bytes = lengths.iter().map(|&length| length * spec.image_dtype.bytes() as usize).collect();
        let images = Images::new(images, image_bytes, window, shared, tier.images.take());
        let files = tier.gradients.take();
        let spilled =
            files.map(|files| SpilledGradients::new(&spec, &layout, &owned, files, Arc::clone(&signal)));
        let spilled = spilled.transpose().map_err(exhausted)?;
        let load = Load::new(&layout, &owned);
        let (spec, layout) = (Arc::new(spec), Arc::new(layout));
        let gradients = Gradients::new((&spec, &layout), &owned, &compute, gradients, spilled);
        let machine = Machine::new(Arc::clone(&spec), Arc::clone(&layout), &owned);
        let job = Job {
            spec,
            layout,
            placement,
            server,
            owned,
            gradients,
            images,
            tier,
            compute,
            load: Mutex::new(load),
            snapshots: Snapshots::default(),
            parts: Arc::default(),
            pushed_bytes: AtomicU64::new(0),
            pulled_bytes: AtomicU64::new(0),
            reservation,
            disk_bytes: need.disk,
            protocol: Protocol::new(machine, signal),
        };
        if let Some(durable) = &job.tier.durable {
            job.protocol.machine().had_joined(&durable.who_joined());
        }
        match recovered {
            Recovered::Nothing => {}
            Recovered::Version(record) => job.recover(record)?,
            Recovered::Interrupted(interrupted) => job.resume_updates(interrupted)?,
        }
        unopened.0 = None;
        Ok(job)
    }
}

/// A store without state, which is removed if the job's opening fails.
struct Unopened(Option<Arc<dyn Durable>>);

impl Drop for Unopened {
    fn drop(&mut self) {
        if let Some(Err(fault)) = self.0.take().map(|store| store.discard()) {
            tracing::warn!(%fault, "the store of a job that could not be opened stays behind");
        }
    }
}

/// Returns the bytes of buffers that a folder of tier `shm` must hold beside the state. The next process
/// finishes a decided step from them.
pub fn kept_buffers(header: &Header) -> Result<u64, Fault> {
    let layout = header.spec.validate()?;
    let owned = header.placement.owned(header.server);
    Ok(Space::bytes(&header.spec, &Shape::of(&header.spec, &layout, &owned)) as u64)
}

fn exhausted(error: AllocationError) -> Fault {
    Fault::new(FaultKind::Exhausted, "memory", error.bytes, "available on the host", error.to_string())
}
