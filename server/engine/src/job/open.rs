//! Opening of a job: memory is reserved, allocated and cut into images, contributions and sums. Then the state that the
//! tier has kept is recovered. The server's open calls, and its start, run this.

use std::{
    path::Path,
    sync::{Arc, Mutex, RwLock, atomic::AtomicU64},
    vec::IntoIter,
};

use longshore_proto::{
    Fault, JobSpec, Layout, Placement, ServerId, ShardId,
    limits::{CONNECTION_BYTES, DATA_CONNECTIONS, SPILLED_PULL_BYTES},
};

use super::{
    Job, Observer,
    compute::Compute,
    gradients::{self, Contribution, Gradients, ShardGradients, SpilledGradients},
    images::{Image, Images, Window, window_need},
    load::Load,
    protocol::{Protocol, Signal},
    share::Share,
    snapshots::Snapshots,
};
use crate::{
    admission::{Budget, Need, exhausted},
    ids::OwnedShard,
    memory::{AllocationError, AtomicWords, Region, SharedFile, Slab},
    step::Machine,
    threads::ThreadPool,
    tier::{
        self, Durable, Inputs, Opened, Recovered, Storage, StoreNeed, StoredJob, gradient_bytes,
        inspect::Report,
    },
};

impl Job {
    /// Validates and admits the job, and touches all memory that its shards need here. If its tier has kept the job,
    /// the job goes on from there.
    pub fn open(
        spec: JobSpec,
        placement: Placement,
        server: ServerId,
        budget: &Budget,
        storage: &Storage,
        compute: Arc<Compute>,
        observer: Observer,
    ) -> Result<Job, Fault> {
        let format = tier::format(&spec, &placement, server, storage)?;
        let share = Arc::new(Share::new(spec, placement, server, format)?);
        let Share { spec, layout, placement, server, owned, .. } = &*share;
        let need = Need::of(spec, layout, &placement.held(*server), storage);
        let reservation = budget.reserve(&need)?;
        let signal = Arc::new(Signal::new(observer));
        // A tier that keeps the buffers brings their memory, so none is allocated here.
        let space = (!tier::keeps_buffers(spec)).then(|| Space::allocate(&share, storage));
        let space = space.transpose().map_err(exhausted)?;
        let inputs = Inputs { spec, layout, owned, placement, server: *server, storage };
        let waker = Arc::clone(&signal);
        let kept_bytes = if space.is_none() { Space::bytes(&share) } else { 0 };
        let opened = tier::open(&inputs, kept_bytes, compute.pool(), Box::new(move || waker.send()))?;
        let Opened { store: mut tier, buffers, recovered } = opened;
        let made = tier.durable.clone().filter(|_| matches!(recovered, Recovered::Nothing));
        let mut unopened = Unopened(made);
        // Images in a tier's memory are not shared: a process that may read its file could also write it.
        let of_tier = |slab| Space { slab, shared: None, widths: Widths::of(spec) };
        let space = space.or_else(|| buffers.map(of_tier));
        let space = space.expect("a tier that keeps the buffers gives their memory");
        // Buffers that an earlier process has left are not new: their contents count.
        let is_new = !matches!(recovered, Recovered::Interrupted(_));
        let Buffers { images, gradients, shared } =
            Buffers::over(space, &share, is_new, compute.pool()).map_err(exhausted)?;
        let window = storage.spills(spec).then(|| Window::allocate(&share, storage, compute.pool()));
        let window = window.transpose().map_err(exhausted)?;
        let files = tier.gradients.take();
        let spilled = files.map(|files| SpilledGradients::new(&share, files, Arc::clone(&signal)));
        let spilled = spilled.transpose().map_err(exhausted)?;
        let (of_machine, at_first) = (Arc::clone(layout), placement.clone());
        let machine = Machine::new(Arc::clone(spec), of_machine, at_first, *server, owned);
        let job = Job {
            gradients: Gradients::new(&share, &compute, gradients, spilled),
            images: Images::new(&share, images, window, shared, &tier),
            snapshots: Snapshots::default(),
            protocol: Protocol::new(spec.name.clone(), machine, &tier, signal),
            load: Mutex::new(Load::new(&share)),
            share: Arc::clone(&share),
            tier,
            compute,
            reservation,
            released: Mutex::new(share.all().filter(|&owned| !share.is_opened(owned)).collect()),
            disk_bytes: AtomicU64::new(need.disk),
            broken: AtomicU64::new(0),
            updated_bytes: AtomicU64::new(0),
        };
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

/// Reads and verifies one server's folder of a job, buffers of tier `shm` included.
///
/// # Errors
/// See [`tier::inspect::inspect`].
pub fn inspect(folder: &Path) -> Result<Report, Fault> {
    tier::inspect::inspect(folder, |header| {
        let (spec, placement) = (header.spec.clone(), header.placement.clone());
        let share = Share::new(spec, placement, header.server, header.format)?;
        Ok(Space::bytes(&share) as u64)
    })
}

impl StoredJob {
    /// Returns the memory and space that opening the job takes.
    ///
    /// # Errors
    /// For a spec or a placement that no job can have.
    pub fn need(&self, storage: &Storage) -> Result<Need, Fault> {
        let layout = self.spec.validate()?;
        self.placement.validate(layout.shards())?;
        Ok(Need::of(&self.spec, &layout, &self.placement.held(self.server), storage))
    }
}

impl Need {
    pub fn of(spec: &JobSpec, layout: &Layout, owned: &[ShardId], storage: &Storage) -> Need {
        let StoreNeed { state, buffers, disk, written } = tier::need(spec, layout, owned, storage);
        let (contributions, accumulators) = if storage.spills(spec) {
            gradients::spilled::need(spec, layout)
        } else {
            let gradients = owned.iter().map(|&shard| gradient_bytes(spec, layout, shard));
            gradients.fold((0, 0), |all, of| (all.0 + of.0, all.1 + of.1))
        };
        let connection =
            CONNECTION_BYTES + if storage.spills(spec) || spec.has_frozen() { SPILLED_PULL_BYTES } else { 0 };
        Need {
            state,
            buffers,
            disk,
            written,
            images: if storage.spills(spec) {
                window_need(spec, layout, storage)
            } else {
                owned.iter().map(|&shard| image_pair(spec, layout, shard)).sum()
            },
            contributions,
            transfers: u64::from(spec.world_size) * (DATA_CONNECTIONS * connection) as u64,
            accumulators,
        }
    }

    /// Bytes that one more shard adds to a job. Buffers, tables and connections serve all shards, and are not counted
    /// here.
    pub fn of_shard(spec: &JobSpec, layout: &Layout, shard: ShardId, spills: bool) -> Need {
        let StoreNeed { state, disk, .. } = tier::shard_need(spec, layout, shard, spills);
        if spills {
            // All shards share the DRAM of images and gradients.
            return Need { state, disk, ..Need::default() };
        }
        let (contributions, accumulators) = gradient_bytes(spec, layout, shard);
        let images = image_pair(spec, layout, shard);
        Need { state, disk, images, contributions, accumulators, ..Need::default() }
    }
}

/// Bytes of a shard's two images. A frozen shard has none beside its state.
fn image_pair(spec: &JobSpec, layout: &Layout, shard: ShardId) -> u64 {
    if layout.is_frozen(shard) { 0 } else { layout.shard_len(shard) * spec.image_dtype.bytes() * 2 }
}

/// The buffers, by owned shard.
struct Buffers {
    images: Vec<[RwLock<Image>; 2]>,
    gradients: Vec<ShardGradients>,
    /// The file that holds all images, if other processes may be given it.
    shared: Option<SharedFile>,
}

/// The memory of a job's buffers, before it is cut.
struct Space {
    slab: Slab,
    /// Images and version stamps, if other processes may map them. Otherwise `slab` has them.
    shared: Option<(Slab, SharedFile)>,
    widths: Widths,
}

/// Bytes of memory for each element of an image, a contribution and a sum; 0 where they live on drives.
#[derive(Clone, Copy)]
struct Widths {
    image: usize,
    contribution: usize,
    sum: usize,
}

impl Widths {
    fn of(spec: &JobSpec) -> Widths {
        Widths {
            image: spec.image_dtype.bytes() as usize,
            contribution: spec.gradient_dtype.bytes() as usize,
            sum: size_of::<f32>(),
        }
    }
}

impl Space {
    /// Allocates the memory. If images are to be shared and the kernel allows it, other processes can be given theirs.
    fn allocate(share: &Share, storage: &Storage) -> Result<Space, AllocationError> {
        let spills = storage.spills(&share.spec);
        let widths =
            if spills { Widths { image: 0, contribution: 0, sum: 0 } } else { Widths::of(&share.spec) };
        let images = Slab::bytes_for(bytes_of(&image_sizes(share, widths.image)));
        let shared =
            (storage.share_images && !spills).then(|| Slab::allocate_shared(images)).and_then(|shared| {
                shared.inspect_err(|error| tracing::info!(%error, "images cannot be mapped by workers")).ok()
            });
        let sizes = sizes(share, widths, shared.is_some());
        let used = sizes.iter().filter(|size| size.used).map(|size| size.bytes);
        let slab = Slab::allocate_sparse(Slab::bytes_for(bytes_of(&sizes)), Slab::bytes_for(used))?;
        Ok(Space { slab, shared, widths })
    }

    /// Returns the bytes that all buffers need in one piece.
    fn bytes(share: &Share) -> usize {
        Slab::bytes_for(bytes_of(&sizes(share, Widths::of(&share.spec), false)))
    }
}

/// The elements of a shard for which there are buffers: none of a frozen shard.
fn buffered(share: &Share, owned: OwnedShard) -> usize {
    if share.is_frozen(owned) { 0 } else { share.elements(owned) }
}

/// The size of one array.
#[derive(Clone, Copy)]
struct Size {
    bytes: usize,
    /// True if the array's shard is this server's from the start.
    used: bool,
}

fn bytes_of(sizes: &[Size]) -> impl Iterator<Item = usize> {
    sizes.iter().map(|size| size.bytes)
}

fn carve(
    slab: Slab,
    sizes: &[Size],
    is_new: bool,
    pool: &ThreadPool,
) -> Result<IntoIter<Region>, AllocationError> {
    let bytes: Vec<usize> = bytes_of(sizes).collect();
    Ok(slab.carve_touching(&bytes, |region| is_new && sizes[region].used, pool)?.into_iter())
}

/// The sizes of the two images of each shard, and last the size of all version stamps. An element has `bytes` bytes.
fn image_sizes(share: &Share, bytes: usize) -> Vec<Size> {
    let image = |owned| Size { bytes: buffered(share, owned) * bytes, used: share.is_opened(owned) };
    let mut sizes: Vec<Size> = share.all().flat_map(|owned| [image(owned); 2]).collect();
    sizes.push(Size { bytes: share.owned.len() * 2 * size_of::<u64>(), used: true });
    sizes
}

/// The sizes of each shard's images, contributions and sums, and last the size of all version stamps. With `apart`
/// images and stamps lie elsewhere and are left out.
fn sizes(share: &Share, widths: Widths, apart: bool) -> Vec<Size> {
    let images = image_sizes(share, widths.image);
    let (pairs, stamps) = images.as_chunks::<2>();
    let mut sizes = Vec::new();
    for (owned, pair) in share.all().zip(pairs) {
        let (elements, used) = (buffered(share, owned), share.is_opened(owned));
        if !apart {
            sizes.extend(pair);
        }
        let array = |bytes| Size { bytes, used };
        for _ in 0..share.spec.gradient_slots() {
            sizes.extend(vec![array(elements * widths.contribution); share.contributors(owned).len()]);
            sizes.push(array(if share.accumulates(owned) { elements * widths.sum } else { 0 }));
        }
    }
    if !apart {
        sizes.extend(stamps);
    }
    sizes
}

impl Buffers {
    /// `pool` is the threads that will work on the buffers. If `is_new`, buffers that are used from the start are
    /// touched.
    fn over(
        space: Space,
        share: &Share,
        is_new: bool,
        pool: &ThreadPool,
    ) -> Result<Buffers, AllocationError> {
        let slots = share.spec.gradient_slots();
        let mut apart = Vec::new().into_iter();
        let sizes = sizes(share, space.widths, space.shared.is_some());
        let mut shared = None;
        if let Some((slab, file)) = space.shared {
            apart = carve(slab, &image_sizes(share, space.widths.image), is_new, pool)?;
            shared = Some(file);
        }
        let mut regions = carve(space.slab, &sizes, is_new, pool)?;
        let stamps = if shared.is_some() { apart.next_back() } else { regions.next_back() };
        let stamps = Arc::new(AtomicWords::new(stamps.expect("one region was carved for the stamps")));
        let mut next = || regions.next().expect("one region was carved for each size");
        let mut buffers = Buffers { images: Vec::new(), gradients: Vec::new(), shared };
        for owned in share.all() {
            buffers.images.push([0, 1].map(|parity| {
                let region = apart.next().unwrap_or_else(&mut next);
                let (stamps, stamp) = (Arc::clone(&stamps), 2 * owned.index() + parity);
                RwLock::new(Image::new(owned, region, stamps, stamp))
            }));
            let (mut contributions, mut accumulators) = (Vec::new(), Vec::new());
            for _ in 0..slots {
                let one = |_| Mutex::new(Contribution::new(next()));
                contributions.push(share.contributors(owned).iter().map(one).collect());
                let region = next();
                accumulators.push(share.accumulates(owned).then(|| Mutex::new(region)));
            }
            let statistics = (0..slots).map(|_| Mutex::new(Vec::new())).collect();
            let left_out = (0..slots).map(|_| Mutex::new(Vec::new())).collect();
            buffers.gradients.push(ShardGradients { contributions, accumulators, statistics, left_out });
        }
        Ok(buffers)
    }
}
