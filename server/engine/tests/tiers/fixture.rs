//! A job's shards on one tier, opened again and again, and their expected bytes.

use std::{
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use longshore_engine::{
    ids::{OwnedShard, OwnedShards},
    record::Record,
    threads::ThreadPool,
    tier::{self, Guard, ImageAge, Inputs, Opened, Recovered, StateMut, StateRef, Storage, Store, Turn},
};
use longshore_proto::{
    Commit, Fault, JobSpec, Layout, Lifetime, Placement, ServerId, ShardId, TierKind, Version,
};

use crate::common::{BLOCK, Dirs, cluster, commit, spec};

/// Bytes of a block's bf16 image.
pub(crate) const IMAGE_BLOCK: usize = 2 * BLOCK;

pub(crate) const FIRST: OwnedShard = OwnedShard(0);

pub(crate) struct TierCase {
    pub(crate) name: &'static str,
    pub(crate) spec: JobSpec,
    layout: Layout,
    placement: Placement,
    owned: Vec<ShardId>,
    pool: ThreadPool,
    dirs: Dirs,
}

impl TierCase {
    pub(crate) fn new(
        name: &'static str,
        tier: TierKind,
        drives: usize,
        set: impl Fn(&mut Storage),
    ) -> TierCase {
        let mut spec = spec(&[5, 3 * BLOCK as u64 + 9], &[0, 1]);
        // Shards of two blocks and of one. The job is delayed, since a delayed job keeps images wherever any
        // job does.
        (spec.tier, spec.max_delay, spec.shard_elements) = (tier, 1, 2 * BLOCK as u64);
        let mut dirs = Dirs::new(drives);
        set(&mut dirs.storage);
        let (layout, placement) = (spec.validate().unwrap(), cluster::placement(&spec, 1));
        let owned = placement.owned(ServerId(0));
        TierCase { name, spec, layout, placement, owned, pool: ThreadPool::new(2).unwrap(), dirs }
    }

    /// Returns how long the tier keeps state: nothing, all memory at any moment of a kill, or durable versions.
    pub(crate) fn lifetime(&self) -> Lifetime {
        self.spec.properties().lifetime
    }

    pub(crate) fn spills(&self) -> bool {
        self.dirs.storage.spills(&self.spec)
    }

    pub(crate) fn try_open(&self, at_most: Option<Version>) -> Result<Opened, Fault> {
        let inputs = Inputs {
            spec: &self.spec,
            layout: &self.layout,
            owned: &self.owned,
            placement: &self.placement,
            server: ServerId(0),
            storage: &Storage { at_most, ..self.dirs.storage.clone() },
        };
        tier::open(&inputs, 1 << 20, &self.pool, Box::new(|| {}))
    }

    pub(crate) fn open(&self) -> Opened {
        self.try_open(None).unwrap()
    }

    /// Returns the store of a job that was loaded with [`loaded`], at version 0.
    pub(crate) fn started(&self) -> Store {
        let store = self.open().store;
        self.load(&store);
        self.start(&store, self.record(0));
        store
    }

    pub(crate) fn load(&self, store: &Store) {
        for owned in self.shards() {
            store.state.load(owned, &mut |state| fill(owned, state)).unwrap();
        }
    }

    pub(crate) fn start(&self, store: &Store, record: Record) {
        if let Some(durable) = &store.durable {
            durable.start(&record, false).unwrap();
        }
    }

    pub(crate) fn shards(&self) -> OwnedShards {
        OwnedShards::all(self.owned.len())
    }

    pub(crate) fn blocks(&self, owned: OwnedShard) -> usize {
        self.layout.shard_len(self.owned[owned.index()]) as usize / BLOCK
    }

    pub(crate) fn commit(&self, version: u64) -> Commit {
        commit(&self.spec, version)
    }

    pub(crate) fn record(&self, version: u64) -> Record {
        let commit = (version > 0).then(|| self.commit(version));
        Record::new(Version(version), version, commit)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.dirs.storage.folders().iter().all(|dir| dir.read_dir().unwrap().next().is_none())
    }

    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut folders = self.dirs.storage.folders();
        while let Some(folder) = folders.pop() {
            for entry in folder.read_dir().unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { folders.push(path) } else { found.push(path) }
            }
        }
        found
    }

    /// Decides a step, updates all shards, and waits until the version is durable.
    pub(crate) fn step(&self, store: &Store, version: u64) {
        self.decide(store, &self.record(version));
        self.shards().for_each(|owned| update(store, owned, version));
        self.finish(store, &self.record(version));
    }

    pub(crate) fn decide(&self, store: &Store, record: &Record) {
        if let Some(durable) = &store.durable {
            durable.decide(record).unwrap();
        }
    }

    pub(crate) fn finish(&self, store: &Store, record: &Record) {
        let Some(behind) = &store.behind else { return };
        behind.finish(record).unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        while behind.durable() < record.version {
            assert!(Instant::now() < end && behind.failure().is_none(), "{:?}", behind.failure());
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Opens an earlier process's store like a job: reads all of it, then adopts it.
    pub(crate) fn recover(&self, at_most: Option<Version>) -> (Store, Recovered) {
        let Opened { store, recovered, .. } = self.try_open(at_most).unwrap();
        if let Recovered::Version(_) = recovered {
            self.shards().for_each(|owned| store.state.read(owned, &mut |_| ()).unwrap());
            store.behind.as_ref().unwrap().adopt().unwrap();
        }
        (store, recovered)
    }
}

/// Returns the byte loaded at a place, after `updates` updates.
pub(crate) fn byte(owned: OwnedShard, array: usize, index: usize, updates: u64) -> u8 {
    ((owned.index() * 31 + array * 7 + index) as u8).wrapping_add(updates as u8)
}

fn fill(owned: OwnedShard, state: StateMut<'_>) {
    for (array, bytes) in state.arrays.into_iter().enumerate() {
        for (index, place) in bytes.iter_mut().enumerate() {
            *place = byte(owned, array, index, 0);
        }
    }
}

/// Checks a shard's bytes after loading and `updates` updates, and reads all of it.
pub(crate) fn check(store: &Store, owned: OwnedShard, updates: u64) {
    let mut read = false;
    store
        .state
        .read(owned, &mut |state: StateRef<'_>| {
            read = true;
            for (array, bytes) in state.arrays.into_iter().enumerate() {
                assert!(!bytes.is_empty(), "array {array} of {owned:?}");
                let wrong = bytes
                    .iter()
                    .enumerate()
                    .find(|(index, found)| **found != byte(owned, array, *index, updates));
                assert_eq!(wrong, None, "{owned:?}, array {array}, after {updates} updates");
            }
        })
        .unwrap();
    assert!(read, "{owned:?} was not handed out");
}

pub(crate) fn check_all(case: &TierCase, store: &Store, updates: u64) {
    case.shards().for_each(|owned| check(store, owned, updates));
}

pub(crate) fn bump(state: &mut StateMut<'_>) {
    for bytes in &mut state.arrays {
        bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
    }
}

pub(crate) fn image(owned: OwnedShard, version: u64) -> Vec<u8> {
    vec![(owned.index() * 16) as u8 + version as u8; IMAGE_BLOCK]
}

/// Updates one shard to a version, and asks the guard about each block.
pub(crate) fn update(store: &Store, owned: OwnedShard, version: u64) {
    store
        .state
        .update(owned, Version(version), &mut |state, guard| blocks(owned, version, state, guard))
        .unwrap();
}

fn blocks(owned: OwnedShard, version: u64, state: StateMut<'_>, guard: &dyn Guard) {
    for (index, mut block) in state.blocks().enumerate() {
        match guard.begin(index, block.as_ref()) {
            Turn::Go(number) => {
                bump(&mut block);
                guard.end(index, number, block.as_ref(), &image(owned, version));
            }
            turn => panic!("block {index} of {owned:?}: {turn:?}"),
        }
    }
}

/// Both ages of images, and how many versions each lies behind.
pub(crate) const AGES: [(ImageAge, u64); 2] = [(ImageAge::Current, 0), (ImageAge::Older, 1)];
