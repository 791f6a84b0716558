//! A job is restored from a checkpoint in two acts. First it is loaded and held; once every other server
//! holds its own part too, it is started. So a fault on one server leaves no job that trains on another.

use longshore_proto::{Fault, FaultKind, ShardId, Version};

use super::{
    Job,
    load::{CheckpointId, Load, LoadedShard, Source, StoredImages},
};
use crate::{
    lock,
    record::Record,
    step::{Phase, Restoring},
};

impl Job {
    /// Fills every shard through `read`, and keeps the job from starting. A checkpoint that was held before
    /// is released. After an error the job waits for weights as if it had just been opened.
    pub fn load(
        &self,
        origin: CheckpointId,
        record: Record,
        images: StoredImages,
        read: &mut dyn FnMut(ShardId, LoadedShard<'_>) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        self.protocol.machine().check_loading()?;
        lock(&self.load).begin_restore(origin)?;
        // Images of an earlier held checkpoint are stale.
        self.images.forget();
        let version = record.version;
        let loaded = self
            .load_shards(&record, images, read)
            .and_then(|()| self.make_images(version, images))
            .and_then(|()| self.check_cancelled());
        match loaded {
            Ok(()) => lock(&self.load).source = Source::Held(Box::new(record)),
            Err(fault) => {
                self.unload();
                return Err(fault);
            }
        }
        self.notify();
        Ok(())
    }

    /// Starts the job from the checkpoint that it holds. A repeat after the start is no error.
    pub fn start_held(&self, id: &str) -> Result<(), Fault> {
        let record = {
            let mut load = lock(&self.load);
            let held = load.origin.as_ref().is_some_and(|origin| origin.id == id);
            match (&load.source, held) {
                (Source::Complete, _) => return Ok(()),
                (Source::Held(record), true) => {
                    let record = record.clone();
                    // A starting job is not held any more, and takes no upload.
                    load.source = Source::Restore;
                    record
                }
                _ => return Err(not_held()),
            }
        };
        let started = self.start(&record);
        match &started {
            Ok(()) => lock(&self.load).finish(),
            Err(_) => self.unload(),
        }
        started
    }

    /// Returns true if the job is filled from these contents, and waits for its start.
    pub fn holds(&self, id: &str) -> bool {
        let load = lock(&self.load);
        matches!(load.source, Source::Held(_)) && load.origin.as_ref().is_some_and(|origin| origin.id == id)
    }

    /// Returns true if the job was started from these contents, of version `version`, and has decided no step
    /// since.
    pub fn started_from(&self, id: &str, version: Version) -> bool {
        let load = lock(&self.load);
        let same =
            load.source == Source::Complete && load.origin.as_ref().is_some_and(|origin| origin.id == id);
        drop(load);
        same && self.protocol.machine().version() == version
    }

    /// Releases the held checkpoint. The job then waits for weights as if it had just been opened.
    pub fn release(&self) -> Result<(), Fault> {
        self.protocol.machine().check_loading()?;
        {
            let mut load = lock(&self.load);
            match load.source {
                Source::Upload => return Ok(()),
                Source::Held(_) => load.source = Source::Restore,
                Source::Restore | Source::Complete => return Err(not_held()),
            }
        }
        self.unload();
        Ok(())
    }

    /// Ends a load in progress before it reads its next shard.
    pub fn cancel_load(&self) {
        lock(&self.load).cancelled = true;
    }

    /// Ends a load in progress, and lets none begin.
    pub fn close_load(&self) {
        lock(&self.load).closed = true;
    }

    pub(super) fn check_cancelled(&self) -> Result<(), Fault> {
        let load = lock(&self.load);
        load.check_open()?;
        if !load.cancelled {
            return Ok(());
        }
        let remedy = "restore the checkpoint again where it is still wanted";
        Err(Fault::new(FaultKind::Precondition, "restore", "given up by an operator", "wanted", remedy))
    }

    /// Returns the checkpoint that is being loaded or is held.
    pub(super) fn restoring(&self, phase: &Phase) -> Option<Restoring> {
        let load = lock(&self.load);
        let held = matches!(load.source, Source::Held(_));
        let origin = load.origin.as_ref().filter(|_| *phase == Phase::Loading)?;
        Some(Restoring { checkpoint: origin.name.clone(), shards: load.shards, held })
    }

    pub(super) fn unload(&self) {
        self.forget();
        let mut load = lock(&self.load);
        let closed = load.closed;
        *load = Load { closed, ..Load::new(&self.layout, &self.owned) };
        drop(load);
        self.notify();
    }
}

fn not_held() -> Fault {
    let remedy = "restore the checkpoint again: another restore or a release came between";
    Fault::new(FaultKind::Precondition, "restore", "not held", "loaded and held", remedy)
}
