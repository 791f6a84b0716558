//! A job split over servers, driven from one thread. Each server has its queue of work.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Range,
    sync::{Arc, Mutex, mpsc},
    time::{Duration, Instant},
};

use longshore_engine::{
    admission::Budget,
    job::{Compute, Exported, IMAGE, Job, Lent, OLDER_IMAGE, Piece, UploadChunk, inspect},
    kernels::Isa,
    memory::Source,
    record::Record,
    step::{Admission, Awaited, Work},
    tier::Storage,
};
use longshore_proto::{
    ChunkId, Commit, Contribution, ContributionChunk, Dtype, Fault, FaultKind, Incarnation, JobSpec, Layout,
    LeftOut, MicroStep, Placement, Rank, ServerId, ShardId, Slice, StateArray, Step, TierKind, Version,
    checksum::{crc32, state_hash},
};

use super::BLOCK;

pub(crate) fn compute(threads: usize, isa: Isa) -> Arc<Compute> {
    Arc::new(Compute::new(threads, isa).unwrap())
}

pub(crate) fn placement(spec: &JobSpec, servers: usize) -> Placement {
    let names = (0..servers).map(|server| format!("server-{server}:7070")).collect();
    spec.striped(names, spec.validate().unwrap().shards())
}

pub(crate) fn soon() -> Instant {
    Instant::now() + WAIT
}

const WAIT: Duration = Duration::from_secs(20);

/// The answer to a pushed chunk. A new chunk may be the last one that a sum waits for: then the answer has the work.
pub(crate) type Stored = Admission<Option<Work>>;

pub(crate) struct Cluster {
    pub(crate) spec: JobSpec,
    pub(crate) layout: Layout,
    pub(crate) placement: Placement,
    pub(crate) jobs: Vec<Arc<Job>>,
    /// Servers that are gone for good, whose jobs are not called.
    pub(crate) lost: BTreeSet<usize>,
    pub(crate) works: Vec<VecDeque<Work>>,
    /// For each server, a message for each chunk that reached the drives.
    arrivals: Vec<Mutex<mpsc::Receiver<()>>>,
    pub(crate) incarnations: Vec<Incarnation>,
    storages: Vec<Storage>,
    compute: Arc<Compute>,
}

impl Cluster {
    pub(crate) fn open(spec: &JobSpec, servers: usize, compute: &Arc<Compute>) -> Cluster {
        Cluster::try_open(spec, servers, compute, &Storage::default()).unwrap()
    }

    /// Opens the job in a tier that outlives servers, with the state that the tier has kept.
    pub(crate) fn try_open(
        spec: &JobSpec,
        servers: usize,
        compute: &Arc<Compute>,
        storage: &Storage,
    ) -> Result<Cluster, Fault> {
        Cluster::open_within(&Budget::new(1 << 32), spec, servers, compute, storage)
    }

    /// Opens the job with a memory `budget` for each server.
    pub(crate) fn open_within(
        budget: &Budget,
        spec: &JobSpec,
        servers: usize,
        compute: &Arc<Compute>,
        storage: &Storage,
    ) -> Result<Cluster, Fault> {
        let (layout, placement) = (spec.validate().unwrap(), placement(spec, servers));
        let open = |server: usize| {
            let budget = Budget::new(budget.total());
            let server = ServerId(server as u32);
            let job = Job::open(
                spec.clone(),
                placement.clone(),
                server,
                &budget,
                storage,
                Arc::clone(compute),
                Box::new(|| {}),
            );
            job.map(Arc::new)
        };
        let jobs = (0..servers).map(open).collect::<Result<Vec<_>, Fault>>()?;
        let works =
            jobs.iter().map(|job: &Arc<Job>| VecDeque::from(job.protocol.take_unfinished())).collect();
        let arrivals = jobs.iter().map(|job: &Arc<Job>| arrivals(job)).collect();
        let known = |rank: usize| jobs.iter().filter_map(|job| job.protocol.ranks()[rank].incarnation).max();
        let incarnations =
            (0..spec.world_size as usize).map(|rank| known(rank).unwrap_or_default()).collect();
        let (spec, storages, compute) = (spec.clone(), vec![storage.clone(); servers], Arc::clone(compute));
        let lost = BTreeSet::new();
        Ok(Cluster { spec, layout, placement, jobs, lost, works, arrivals, incarnations, storages, compute })
    }

    /// Opens, joins and loads a job on servers with two threads and the best instruction set.
    pub(crate) fn started(spec: &JobSpec, servers: usize, weights: &[f32]) -> Cluster {
        let mut cluster = Cluster::open(spec, servers, &compute(2, Isa::detect()));
        (0..spec.world_size).for_each(|rank| cluster.join(rank));
        cluster.upload(weights);
        cluster
    }

    pub(crate) fn owner(&self, shard: ShardId) -> usize {
        self.placement.owner(shard).0 as usize
    }

    pub(crate) fn living(&self) -> impl Iterator<Item = usize> + use<> {
        let lost = self.lost.clone();
        (0..self.jobs.len()).filter(move |server| !lost.contains(server))
    }

    /// Loses a server for good, and tells the other servers. The next commit must name the loss.
    pub(crate) fn lose(&mut self, server: usize) {
        self.lost.insert(server);
        self.works[server].clear();
        for living in self.living() {
            let works = self.jobs[living].lose(vec![ServerId(server as u32)]);
            self.works[living].extend(works);
        }
    }

    /// Joins the rank's next process to every server.
    pub(crate) fn join(&mut self, rank: u32) {
        let incarnation = &mut self.incarnations[rank as usize];
        incarnation.0 += 1;
        for job in &self.jobs {
            assert_eq!(job.join(Rank(rank), *incarnation, None), Ok(true));
            job.protocol.keep_joined().unwrap();
        }
    }

    pub(crate) fn upload(&self, weights: &[f32]) {
        let bytes = super::encode(weights, Dtype::F32);
        for shard in (0..self.layout.shards()).map(ShardId) {
            for chunk in (0..self.layout.chunks(shard, Dtype::F32)).map(ChunkId) {
                let payload = self.payload(&bytes, shard, chunk, Dtype::F32);
                for holder in self.placement.holders_at(shard, Step(1)) {
                    let job = &self.jobs[holder.0 as usize];
                    upload(job, self.incarnations[0], (shard, chunk), payload).unwrap();
                }
            }
        }
    }

    /// Fills the job with state arrays of the whole flat space. `applied` updates made them; parameters in `left_out`
    /// had fewer.
    pub(crate) fn upload_state(&self, state: &[Vec<f32>], applied: u64, left_out: &[LeftOut]) {
        for (&array, values) in StateArray::of(self.spec.rule).iter().zip(state) {
            let bytes = super::encode(values, Dtype::F32);
            for shard in (0..self.layout.shards()).map(ShardId) {
                self.upload_array(array, &bytes, shard, (applied, left_out)).unwrap();
            }
        }
    }

    /// Uploads one shard's part of a state array, which `bytes` has for the whole flat space.
    pub(crate) fn upload_array(
        &self,
        array: StateArray,
        bytes: &[u8],
        shard: ShardId,
        (applied, left_out): (u64, &[LeftOut]),
    ) -> Result<(), Fault> {
        for chunk in (0..self.layout.chunks(shard, Dtype::F32)).map(ChunkId) {
            let payload = self.payload(bytes, shard, chunk, Dtype::F32);
            let (applied, left_out, crc32) = (Some(applied), left_out.to_vec(), crc32(payload));
            let part = UploadChunk { shard, array, chunk, applied, left_out, crc32 };
            self.jobs[self.owner(shard)].upload_chunk(self.incarnations[0], part, payload)?;
        }
        Ok(())
    }

    /// Returns the number of updates, and each array of the rule in fp32, over the whole flat space.
    pub(crate) fn exported(&self) -> (Vec<Vec<f32>>, u64) {
        let arrays = StateArray::of(self.spec.rule).len();
        let mut shards: BTreeMap<ShardId, Vec<Vec<f32>>> = BTreeMap::new();
        let mut applied = None;
        for job in &self.jobs {
            let keep = |piece: &Piece| {
                let of_shard = shards.entry(piece.shard).or_insert_with(|| vec![Vec::new(); arrays]);
                let known = if self.layout.is_frozen(piece.shard) { 1 } else { arrays };
                for block in piece.blocks() {
                    of_shard[known..].iter_mut().for_each(|array| array.resize(array.len() + BLOCK, 0.0));
                    for (array, bytes) in of_shard[..known].iter_mut().zip(block.chunks(block.len() / arrays))
                    {
                        array.extend_from_slice(bytemuck::cast_slice(bytes));
                    }
                }
                Ok(())
            };
            let info = job.begin_export(None, Exported::State).unwrap().run(soon(), keep).unwrap();
            assert_eq!(*applied.get_or_insert(info.applied), info.applied);
        }
        let of_array =
            |array: usize| shards.values().flat_map(|shard| shard[array].iter().copied()).collect();
        ((0..arrays).map(of_array).collect(), applied.unwrap())
    }

    fn payload<'a>(&self, flat: &'a [u8], shard: ShardId, chunk: ChunkId, dtype: Dtype) -> &'a [u8] {
        let start = self.layout.shard_range(shard).start * dtype.bytes();
        let range = self.layout.chunk_bytes(shard, chunk, dtype).unwrap();
        &flat[(start + range.start) as usize..(start + range.end) as usize]
    }

    /// Returns the chunks of one rank's contributions to a micro-step, each with its part of `flat`.
    pub(crate) fn chunks<'a>(
        &self,
        step: u64,
        micro_step: u32,
        rank: u32,
        flat: &'a [u8],
    ) -> Vec<(ContributionChunk, &'a [u8])> {
        let dtype = self.spec.gradient_dtype;
        let mut found = Vec::new();
        let contributes = |shard: &ShardId| self.layout.contributors(*shard).contains(&Rank(rank));
        for shard in (0..self.layout.shards()).map(ShardId).filter(contributes) {
            for chunk in (0..self.layout.chunks(shard, dtype)).map(ChunkId) {
                let payload = self.payload(flat, shard, chunk, dtype);
                let (step, micro_step, rank) = (Step(step), MicroStep(micro_step), Rank(rank));
                let contribution = Contribution { step, micro_step, rank, shard };
                let incarnation = self.incarnations[rank.index()];
                let (bytes, crc32) = (payload.len() as u64, crc32(payload));
                let chunk = ContributionChunk {
                    contribution,
                    incarnation,
                    chunk,
                    loss_scale: 1.0,
                    dtype,
                    bytes,
                    crc32,
                    reads: Default::default(),
                    lent: false,
                };
                found.push((chunk, payload));
            }
        }
        found
    }

    /// Returns the contributions of [`Cluster::chunks`], but each shard's whole gradient as one lent chunk.
    pub(crate) fn lent<'a>(
        &self,
        step: u64,
        micro_step: u32,
        rank: u32,
        flat: &'a [u8],
    ) -> Vec<(ContributionChunk, &'a [u8])> {
        let firsts = self.chunks(step, micro_step, rank, flat).into_iter();
        let whole = |(chunk, _): (ContributionChunk, &'a [u8])| {
            let part = self.part(flat, chunk.contribution.shard, chunk.dtype.bytes() as usize);
            (ContributionChunk { bytes: part.len() as u64, crc32: 0, lent: true, ..chunk }, part)
        };
        firsts.filter(|(chunk, _)| chunk.chunk == ChunkId(0)).map(whole).collect()
    }

    pub(crate) fn store(&mut self, chunk: &ContributionChunk, payload: &[u8]) -> Result<Stored, Fault> {
        let Contribution { shard, step, .. } = chunk.contribution;
        let holders = self.placement.holders_at(shard, step).map(|holder| holder.0 as usize);
        let mut outcome = Admission::Decided;
        for server in holders.filter(|holder| !self.lost.contains(holder)).collect::<Vec<_>>() {
            outcome = self.store_on(server, chunk, payload)?;
        }
        Ok(outcome)
    }

    fn store_on(
        &mut self,
        server: usize,
        chunk: &ContributionChunk,
        payload: &[u8],
    ) -> Result<Stored, Fault> {
        let job = &self.jobs[server];
        let stored = store(job, chunk, payload)?;
        if let Admission::New(work) = stored {
            self.works[server].extend(work);
            if job.gradients.are_spilled() && !chunk.lent {
                self.arrivals[server]
                    .lock()
                    .unwrap()
                    .recv_timeout(WAIT)
                    .expect("the chunk reaches the drives");
                self.works[server].extend(job.collect()?);
            }
        }
        Ok(stored)
    }

    /// Pushes all contributions of a step in order, and makes each sum once it is complete. `flats` has one gradient
    /// for each micro-step and rank, in this order.
    pub(crate) fn push(&mut self, step: u64, flats: &[Vec<u8>]) {
        let world = self.spec.world_size as usize;
        for (index, flat) in flats.iter().enumerate() {
            for (chunk, payload) in self.chunks(step, (index / world) as u32, (index % world) as u32, flat) {
                let stored = self.store(&chunk, payload).unwrap();
                assert_ne!(stored, Admission::Busy, "{:?}", chunk.contribution);
            }
            if (index + 1) % world == 0 {
                self.work();
            }
        }
    }

    /// Does all pending work of all servers.
    pub(crate) fn work(&mut self) {
        for server in self.living() {
            while self.work_once(server) {}
        }
    }

    /// Does a server's oldest work. Sums that follow each other are made together, as by its compute thread. Returns
    /// false if the queue is empty.
    pub(crate) fn work_once(&mut self, server: usize) -> bool {
        let works = &mut self.works[server];
        let any = !works.is_empty();
        if any {
            self.jobs[server].perform(works).unwrap();
        }
        any
    }

    /// Commits on every server. Returns true for a server that had the same decision already.
    pub(crate) fn commit(&mut self, commit: &Commit) -> Result<Vec<bool>, Fault> {
        let mut duplicates = Vec::new();
        if self.has_durable_later() {
            self.settle()?;
        }
        for server in self.living() {
            let (duplicate, work) = self.jobs[server].commit(self.incarnations[0], commit.clone())?;
            self.works[server].extend(work);
            duplicates.push(duplicate);
        }
        if let Some(change) = &commit.placement {
            self.placement.apply(change, commit.step, self.spec.max_delay);
        }
        Ok(duplicates)
    }

    /// Returns true if a restart of some server may take back its newest version, which is not durable at once.
    pub(crate) fn has_durable_later(&self) -> bool {
        self.living().any(|server| self.jobs[server].spec().properties().durable_later)
    }

    /// Opens a server that owns no shard yet, and has room for all. The next commit must name its address.
    pub(crate) fn add_server(&mut self, tier: TierKind, storage: &Storage) -> String {
        let address = format!("server-{}:7070", self.jobs.len());
        let server = ServerId(self.jobs.len() as u32);
        let mut target = self.placement.clone();
        target.epoch.0 += 1;
        target.servers.push(address.clone());
        target.owners.fill(server);
        let job = self.open_one(JobSpec { tier, ..self.spec.clone() }, target, server, storage);
        for (rank, incarnation) in self.incarnations.iter().enumerate() {
            assert_eq!(job.join(Rank(rank as u32), *incarnation, None), Ok(true));
        }
        let record = self.jobs[self.living().next().unwrap()].progress();
        let record = Record::new(record.version, record.applied, record.last_commit);
        let ranks = vec![None; self.incarnations.len()];
        job.begin(self.incarnations[0], self.placement.clone(), record, &ranks).unwrap();
        self.arrivals.push(arrivals(&job));
        self.jobs.push(Arc::new(job));
        self.storages.push(storage.clone());
        self.works.push(VecDeque::new());
        address
    }

    fn open_one(&self, spec: JobSpec, placement: Placement, server: ServerId, storage: &Storage) -> Job {
        let (budget, observer) = (Budget::new(1 << 32), Box::new(|| {}));
        Job::open(spec, placement, server, &budget, storage, Arc::clone(&self.compute), observer).unwrap()
    }

    /// Opens the job again on a server whose process has ended. Its drives have version `before` or a later one. With
    /// `steps_back` the job opens at `before`, otherwise at the newest version there.
    pub(crate) fn restart(&mut self, server: usize, before: Version, steps_back: bool) {
        let job = self.jobs.remove(server);
        let (spec, placement, number) = (job.spec().clone(), job.opened_with().clone(), job.server());
        drop(Arc::into_inner(job).expect("the only user"));
        for dir in self.storages[server].folders() {
            let folder = format!("{}/server-{}-of-{}", self.spec.name, number.0, placement.servers.len());
            let deadline = soon();
            let report = loop {
                // A process that another test forks inherits the folder's lock until it begins its program.
                match inspect(&dir.join(&folder)) {
                    Err(fault) if fault.kind == FaultKind::Conflict && Instant::now() < deadline => {
                        std::thread::yield_now();
                    }
                    report => break report.unwrap(),
                }
            };
            let damaged = report.versions.iter().find(|of| of.version >= before && !of.damaged.is_empty());
            assert!(damaged.is_none() && report.damage.is_empty(), "{report:?}");
        }
        let at_most = steps_back.then_some(before);
        let storage = Storage { at_most, ..self.storages[server].clone() };
        let job = self.open_one(spec, placement, number, &storage);
        self.works[server] = job.protocol.take_unfinished().into();
        self.arrivals[server] = arrivals(&job);
        self.jobs.insert(server, Arc::new(job));
    }

    /// Copies the first shard that a server awaits and another server has ready. Stops after `pieces` pieces. Returns
    /// false if no such shard exists.
    pub(crate) fn fetch(&mut self, server: usize, mut pieces: usize) -> bool {
        let source = |awaited: &Awaited| &self.jobs[awaited.source.0 as usize];
        let is_ready = |it: &Awaited| {
            if self.lost.contains(&(it.source.0 as usize)) {
                return false;
            }
            let is_made = source(it).check_fetch(it.shard, it.version).unwrap().is_some();
            is_made && self.jobs[server].check_image(it).unwrap().is_some()
        };
        let Some(awaited) = self.jobs[server].awaited().into_iter().find(is_ready) else { return false };
        let (job, source) = (&self.jobs[server], source(&awaited));
        let sent = source.sent_bytes(awaited.shard, awaited.version).unwrap();
        for (array, length) in (0..).zip(sent) {
            let piece = if array >= IMAGE { 4 * BLOCK } else { 100_000 };
            for start in (0..length).step_by(piece) {
                if pieces == 0 {
                    return true;
                }
                pieces -= 1;
                let bytes = start..length.min(start + piece);
                let bytes = source.read_handed(awaited.shard, awaited.version, array, bytes).unwrap();
                job.write_fetched(&awaited, array, start, &bytes).unwrap();
            }
        }
        source.check_handed(awaited.shard).unwrap();
        let (works, of_source) = (
            job.fetched(&awaited, sent[OLDER_IMAGE as usize] > 0).unwrap(),
            source.arrived(awaited.shard, awaited.version).unwrap(),
        );
        self.works[server].extend(works);
        self.works[awaited.source.0 as usize].extend(of_source);
        true
    }

    /// Does all work and waits until every server has made its version durable, as rank 0 does before it commits.
    pub(crate) fn settle(&mut self) -> Result<(), Fault> {
        let deadline = soon();
        for server in 0..self.jobs.len() {
            while !self.works[server].is_empty() {
                self.jobs[server].perform(&mut self.works[server])?;
            }
            let job = &self.jobs[server];
            while job.protocol.durable() < job.progress().version {
                assert!(Instant::now() < deadline, "never durable");
                job.protocol.settle(deadline)?;
                job.protocol.check_alive()?;
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        Ok(())
    }

    /// Makes a whole exact step: push, commit, update.
    pub(crate) fn step(&mut self, flats: &[Vec<u8>], commit: &Commit) {
        self.push(commit.step.0, flats);
        self.commit(commit).unwrap();
        self.work();
    }

    /// Returns each block's sum of squares. None until every server has the statistics.
    pub(crate) fn squares(&self, step: u64) -> Option<Vec<f64>> {
        let mut squares = Vec::new();
        for shard in (0..self.layout.shards()).map(ShardId) {
            let statistics = self.jobs[self.owner(shard)].statistics(shard, Step(step)).unwrap()?;
            if self.layout.is_frozen(shard) {
                assert!(statistics.is_empty());
                squares.extend(self.layout.shard_blocks(shard).map(|_| 0.0));
            }
            squares.extend(statistics.iter().map(|block| block.sum_squares));
        }
        Some(squares)
    }

    /// Returns the parameters that no server has a gradient for, in a complete step.
    pub(crate) fn left_out(&self, step: u64) -> Vec<u32> {
        let shards = (0..self.layout.shards()).map(ShardId);
        let of_shard = |shard| self.jobs[self.owner(shard)].left_out(shard, Step(step)).unwrap();
        shards.flat_map(of_shard).collect()
    }

    pub(crate) fn hash(&self) -> String {
        self.try_hash().unwrap()
    }

    pub(crate) fn try_hash(&self) -> Result<String, Fault> {
        let mut blocks = Vec::new();
        let mut at = None;
        for job in self.living().map(|server| &self.jobs[server]) {
            let (info, hashes) = job.state_hashes(soon())?;
            let here = (info.version, info.applied);
            assert_eq!(*at.get_or_insert(here), here, "servers disagree on the version");
            blocks.extend(hashes);
        }
        blocks.sort();
        assert!(blocks.iter().enumerate().all(|(index, (block, _))| index == block.0 as usize));
        let (version, applied) = at.unwrap();
        Ok(state_hash(version, applied, blocks.iter().map(|(_, hash)| hash)))
    }

    /// Returns a shard's image, None before the image is there, or the fault.
    pub(crate) fn image(&self, shard: ShardId, version: u64) -> Result<Option<Vec<u8>>, Fault> {
        let slice = Slice { shard, offset: 0, elements: self.layout.shard_len(shard) };
        let mut pulled = Ok(None);
        for holder in self.placement.sources_at(shard, Step(version)) {
            let job = &self.jobs[holder.0 as usize];
            job.check_slice(&slice, self.spec.image_dtype)?;
            pulled = job.copy_image(&slice, Version(version));
            // If a holder's state is broken, ranks pull from the other holder.
            if !pulled.as_ref().is_err_and(|fault| fault.field == "state") {
                break;
            }
        }
        Ok(pulled?.map(|pulled| pulled.bytes))
    }

    /// Returns a shard's part of a flat array whose elements have `size` bytes.
    pub(crate) fn part<'a>(&self, flat: &'a [u8], shard: ShardId, size: usize) -> &'a [u8] {
        let range = self.layout.shard_range(shard);
        &flat[range.start as usize * size..range.end as usize * size]
    }
}

/// Returns a receiver that gets a message for each chunk that reaches a job's drives.
fn arrivals(job: &Job) -> Mutex<mpsc::Receiver<()>> {
    let (sender, arrivals) = mpsc::channel();
    job.gradients.on_arrival(Box::new(move || _ = sender.send(())));
    Mutex::new(arrivals)
}

/// Uploads a chunk of weights. The job gets no other state.
pub(crate) fn upload(
    job: &Job,
    incarnation: Incarnation,
    (shard, chunk): (ShardId, ChunkId),
    payload: &[u8],
) -> Result<(), Fault> {
    let (array, left_out, crc32) = (StateArray::Master, Vec::new(), crc32(payload));
    let part = UploadChunk { shard, array, chunk, applied: None, left_out, crc32 };
    job.upload_chunk(incarnation, part, payload)
}

/// Pushes a chunk with its whole payload, which is copied or lent as the chunk says.
pub(crate) fn store(job: &Arc<Job>, chunk: &ContributionChunk, payload: &[u8]) -> Result<Stored, Fault> {
    let mut outcome = Ok(());
    let stored = job.admit(chunk)?.and_then(|mut writing| {
        let written = match chunk.lent {
            true => writing.lend(Arc::new(Aligned::new(payload))),
            false => writing.write(payload),
        };
        let finished = written.and_then(|()| writing.finish());
        Admission::New(finished.unwrap_or_else(|fault| {
            outcome = Err(fault);
            None
        }))
    });
    outcome.map(|()| stored)
}

/// Bytes that begin on a cache line, like a worker's lent gradients.
struct Aligned {
    memory: Vec<u8>,
    range: Range<usize>,
}

impl Aligned {
    fn new(bytes: &[u8]) -> Aligned {
        let mut memory = vec![0; bytes.len() + 64];
        let start = memory.as_ptr().align_offset(64);
        let range = start..start + bytes.len();
        memory[range.clone()].copy_from_slice(bytes);
        Aligned { memory, range }
    }
}

impl Lent for Aligned {
    fn bytes(&self) -> Source<'_, u8> {
        self.memory[self.range.clone()].into()
    }
}
