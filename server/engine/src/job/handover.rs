//! Handovers of shards between servers: the owner before gives the state, and the new owner takes it.
//!
//! The owner before makes no further update of such a shard, so the new owner reads unchanging state. The server's
//! calls run this, on their own threads. Connections and retries are the server's.

use std::{ops::Range, sync::atomic::Ordering};

use longshore_proto::{
    Epoch, Fault, FaultKind, Incarnation, Placement, Rank, ServerId, ShardId, Step, Version,
};

use super::{Job, compute::BLOCK};
use crate::{
    admission::{Need, exhausted},
    ids::OwnedShard,
    lock,
    record::{Joined, Record},
    step::{Awaited, Work},
    tier::{ImageAge, Shape, without_place_in_tmpfs},
};

/// Number of the image among the arrays that a handover transfers, after the state's three. The image of the version
/// before follows: ranks of a delayed job may still read it.
pub const IMAGE: u32 = 3;
pub const OLDER_IMAGE: u32 = 4;

/// Bytes of each array that a handover transfers.
pub type HandedBytes = [usize; OLDER_IMAGE as usize + 1];

impl Job {
    /// Takes part in a running job from the version of `record` on, without any shard.
    ///
    /// # Errors
    /// `Fenced` for any process but rank 0's; `Precondition` if this server already owns shards.
    pub fn begin(
        &self,
        incarnation: Incarnation,
        placement: Placement,
        record: Record,
        ranks: &[Option<Joined>],
    ) -> Result<(), Fault> {
        self.protocol.check_alive()?;
        placement.validate(self.share.layout.shards())?;
        let record = {
            let mut machine = self.protocol.machine();
            machine.begin_without_shards(incarnation, placement, record, ranks)?;
            machine.record()
        };
        if let Some(durable) = &self.tier.durable {
            for (rank, joined) in (0..).map(Rank).zip(ranks) {
                joined.iter().for_each(|&joined| self.protocol.tell_joined(rank, joined, false));
            }
            self.protocol.keep_joined()?;
            durable.start(&record).map_err(|fault| self.protocol.fail(fault))?;
        }
        lock(&self.load).finish();
        self.protocol.notify();
        Ok(())
    }

    /// Takes another placement of the current version. Undecided steps begin anew. Returns false while an update or a
    /// transfer is under way: call again after a change.
    ///
    /// # Errors
    /// `Fenced` for any process but rank 0's. `Conflict` for another version, or a placement that is not newer.
    pub fn place(
        &self,
        incarnation: Incarnation,
        version: Version,
        placement: Placement,
    ) -> Result<bool, Fault> {
        self.protocol.check_alive()?;
        placement.validate(self.share.layout.shards())?;
        let mut machine = self.protocol.machine();
        if *machine.placement() == placement {
            // The placement was taken by an earlier call, whose answer was lost.
            return Ok(machine.check_rank_zero(incarnation).map(|()| true)?);
        }
        if self.protocol.written().is_some_and(|durable| durable < machine.version())
            || !machine.place(incarnation, version, placement)?
        {
            return Ok(false);
        }
        self.snapshots.tell(&machine);
        for rank in (0..self.share.spec.world_size).map(Rank) {
            let joined = machine.joined(rank);
            joined.into_iter().for_each(|joined| self.protocol.tell_joined(rank, joined, true));
            self.gradients.give_back_unneeded(&machine, rank);
        }
        // The machine stays locked: no caller may learn of the placement before the tier has it.
        if let Some(durable) = &self.tier.durable {
            durable.place(&machine.record()).map_err(|fault| self.protocol.fail(fault))?;
        }
        drop(machine);
        self.protocol.keep_joined()?;
        self.protocol.notify();
        Ok(true)
    }

    /// Takes the address at which a server of the job answers now. Returns the address before, if it differs.
    pub fn readdress(&self, server: ServerId, address: &str) -> Option<String> {
        self.protocol.machine().readdress(server, address)
    }

    /// The shards that this server owns at a step, in forward order, and those it replicates for an owner that is given
    /// up.
    pub fn owned_at(&self, step: Step) -> Vec<ShardId> {
        let machine = self.protocol.machine();
        let owned = self.share.all().filter(|&owned| machine.answers_for(owned, step));
        owned.map(|owned| self.share.shard(owned)).collect()
    }

    /// The shards that this server owns or replicates at a step, in forward order.
    pub fn held_at(&self, step: Step) -> Vec<ShardId> {
        let machine = self.protocol.machine();
        let owned = self.share.all().filter(|&owned| machine.owns(owned, step));
        owned.map(|owned| self.share.shard(owned)).collect()
    }

    /// Returns true if this server owns or replicates a shard at a step, by the newest decision.
    pub fn holds_at(&self, shard: ShardId, step: Step) -> bool {
        let machine = self.protocol.machine();
        machine.owned_index(shard).is_ok_and(|owned| machine.owns(owned, step))
    }

    /// Notes that a new replica has the state of a shard. Returns the updates that waited for the replica.
    pub fn arrived(&self, shard: ShardId, version: Version) -> Result<Vec<Work>, Fault> {
        let mut machine = self.protocol.machine();
        let owned = machine.owned_index(shard)?;
        Ok(machine.arrived(owned, version))
    }

    /// Returns a shard whose last copy is on these servers, as far as this server knows.
    pub fn last_of(&self, lost: &[ServerId]) -> Option<ShardId> {
        self.protocol.machine().last_of(lost)
    }

    /// Ends the waits for servers that are lost. Returns the updates that waited for replicas on these servers.
    pub fn lose(&self, lost: Vec<ServerId>) -> Vec<Work> {
        self.protocol.machine().lose(lost)
    }

    /// Returns true while the state of a shard is being fetched.
    pub fn awaits(&self, awaited: &Awaited) -> bool {
        let machine = self.protocol.machine();
        machine.owned_index(awaited.shard).is_ok_and(|owned| machine.awaits(owned, awaited.version))
    }

    /// Returns true if this server was prepared for a running job and never owned a shard. Such a job may be opened for
    /// other shards.
    pub fn is_spare(&self) -> bool {
        self.share.placement.epoch > Epoch(1) && self.protocol.machine().is_without_shards()
    }

    /// Returns true if an update waits for a shard that is being fetched.
    pub fn is_held(&self) -> bool {
        self.protocol.machine().is_held()
    }

    /// Number of shards whose state is not here, even if the server that should send it is lost.
    pub fn lacking(&self) -> usize {
        self.protocol.machine().lacking()
    }

    /// The shards whose state this server fetches, each with the fetched version.
    pub fn awaited(&self) -> Vec<Awaited> {
        self.protocol.machine().awaited()
    }

    /// Returns true if [`Job::free_handed`] would free a shard.
    pub fn may_free(&self) -> bool {
        !self.protocol.machine().handed().is_empty()
    }

    /// Frees memory and space of shards that other servers own now. Waits for snapshots that still copy these shards.
    pub fn free_handed(&self) {
        let handed = self.protocol.machine().handed();
        for owned in handed {
            self.snapshots.take_before(self, owned, Step(u64::MAX));
            let mut released = lock(&self.released);
            // A decision may have brought the shard back while the copies were made.
            if self.protocol.machine().forget(owned) && released.insert(owned) {
                self.free(owned);
            }
        }
    }

    fn reserve_space(&self, owned: OwnedShard) -> Result<(), Fault> {
        self.tier.state.make_room(owned)?;
        self.images.make_room(owned).map_err(exhausted)?;
        self.gradients.make_room(owned)
    }

    pub(super) fn release_space(&self, owned: OwnedShard) {
        self.tier.state.release(owned);
        self.images.release(owned);
        self.gradients.release(owned);
    }

    fn free(&self, owned: OwnedShard) {
        self.release_space(owned);
        let need = self.bytes_of(owned);
        self.reservation.give_back(need.total());
        self.disk_bytes.fetch_sub(need.disk, Ordering::Relaxed);
    }

    /// Reserves memory and space for shards that shall move here, once `admit` has allowed the bytes of both. Memory
    /// for shards of an earlier plan that never came is given back.
    ///
    /// # Errors
    /// `Exhausted` if there is no room by now, and the errors of `admit`.
    pub fn make_room<T>(
        &self,
        shards: &[ShardId],
        admit: impl FnOnce(u64, u64) -> Result<T, Fault>,
    ) -> Result<(), Fault> {
        let mut released = lock(&self.released);
        for owned in self.share.all().filter(|&owned| !shards.contains(&self.share.shard(owned))) {
            if self.protocol.machine().is_unowned(owned) && released.insert(owned) {
                self.free(owned);
            }
        }
        let mut coming = Vec::new();
        for &shard in shards {
            let place = self.protocol.machine().owned_index(shard);
            let owned = place.map_err(|_| without_place_in_tmpfs(&self.share.spec.name, shard))?;
            if released.contains(&owned) {
                coming.push((owned, self.bytes_of(owned)));
            }
        }
        let memory = coming.iter().map(|(_, need)| need.total()).sum();
        let _admitted = admit(memory, coming.iter().map(|(_, need)| need.disk).sum())?;
        for (owned, need) in coming {
            let reserved = self.reservation.budget().reserve(&need)?;
            self.reserve_space(owned).inspect_err(|_| self.release_space(owned))?;
            self.reservation.add(reserved);
            self.disk_bytes.fetch_add(need.disk, Ordering::Relaxed);
            released.remove(&owned);
        }
        Ok(())
    }

    /// The memory and space of one shard.
    pub(super) fn bytes_of(&self, owned: OwnedShard) -> Need {
        let (spec, layout) = (&self.share.spec, &self.share.layout);
        Need::of_shard(spec, layout, self.share.shard(owned), self.images.are_spilled())
    }

    /// Returns Some once this server has made its last version of a shard.
    pub fn check_fetch(&self, shard: ShardId, version: Version) -> Result<Option<()>, Fault> {
        self.protocol.check_alive()?;
        let machine = self.protocol.machine();
        let owned = machine.owned_index(shard)?;
        Ok(machine.check_fetch(owned, version)?.then_some(()))
    }

    /// Bytes of each array that a handover of the shard transfers: the state's arrays, then the images.
    pub fn handed_bytes(&self, shard: ShardId) -> Result<HandedBytes, Fault> {
        let owned = self.protocol.machine().owned_index(shard)?;
        let mut bytes = HandedBytes::default();
        let shape = Shape::of_shard(&self.share.spec, &self.share.layout, shard);
        let arrays = shape.arrays(self.share.elements(owned));
        bytes[..arrays.len()].copy_from_slice(&arrays);
        // The image of an exact job follows from its master weights, so it is not transferred.
        if self.share.spec.max_delay > 0 && !self.share.is_frozen(owned) {
            bytes[IMAGE as usize..].fill(self.images.len(owned));
        }
        Ok(bytes)
    }

    /// Bytes of each array that this server sends of a version. A job that was just filled may have no image of the
    /// version before.
    pub fn sent_bytes(&self, shard: ShardId, version: Version) -> Result<HandedBytes, Fault> {
        let mut bytes = self.handed_bytes(shard)?;
        let owned = self.protocol.machine().owned_index(shard)?;
        let older = version.0.checked_sub(1).map(Version);
        let has_older = older.map_or(Ok(false), |older| self.images.read(owned, older, 0..0, &mut |_| {}))?;
        bytes[OLDER_IMAGE as usize] *= usize::from(has_older);
        Ok(bytes)
    }

    /// Compares a shard with its checksums before its last bytes are handed over, so that no flipped bit reaches the
    /// next holder.
    pub fn check_handed(&self, shard: ShardId) -> Result<(), Fault> {
        let owned = self.protocol.machine().owned_index(shard)?;
        self.check_blocks(owned, 0..self.share.blocks(owned))
    }

    /// Copies bytes of a shard that [`Job::check_fetch`] has found ready.
    pub fn read_handed(
        &self,
        shard: ShardId,
        version: Version,
        array: u32,
        bytes: Range<usize>,
    ) -> Result<Vec<u8>, Fault> {
        // Checked before each read: a new replica that has been lost meanwhile may not read the state.
        self.check_fetch(shard, version)?.ok_or_else(|| lost(shard, version))?;
        let owned = self.protocol.machine().owned_index(shard)?;
        let mut copy = Vec::with_capacity(bytes.len());
        if array >= IMAGE {
            let of = Version(version.0.saturating_sub(u64::from(array - IMAGE)));
            let found = self.images.read(owned, of, bytes, &mut |part| copy.extend_from_slice(part))?;
            return if found { Ok(copy) } else { Err(lost(shard, version)) };
        }
        let array = array as usize;
        self.tier.state.read_part(owned, array, bytes, &mut |part| copy.extend_from_slice(part))?;
        Ok(copy)
    }

    /// Writes bytes of an awaited shard's array.
    ///
    /// # Errors
    /// `Invalid` for bytes outside of the array; nothing is written.
    pub fn write_fetched(
        &self,
        awaited: &Awaited,
        array: u32,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), Fault> {
        let owned = self.protocol.machine().owned_index(awaited.shard)?;
        let length = self.handed_bytes(awaited.shard)?.get(array as usize).copied().unwrap_or(0);
        let place = offset..offset.saturating_add(bytes.len());
        let block = BLOCK * self.share.spec.image_dtype.bytes() as usize;
        let is_cut = array >= IMAGE && [offset, bytes.len()].iter().any(|at| !at.is_multiple_of(block));
        if place.end > length || is_cut {
            let value = format!("bytes {place:?} of array {array} of {}", awaited.shard);
            let remedy = "use one version of Longshore on all servers of a job";
            let limit = format!("within its {length}, and whole blocks of an image");
            return Err(Fault::invalid("fetch.offset", value, limit, remedy));
        }
        // If this server had the shard earlier, a snapshot may still need that state. Such snapshots copy it first.
        self.snapshots.take_before(self, owned, awaited.version.next_step());
        if array >= IMAGE {
            let age = if array == IMAGE { ImageAge::Current } else { ImageAge::Older };
            return self.images.receive((owned, awaited.version, age), offset, bytes);
        }
        self.tier.state.load(owned, &mut |state| {
            state.arrays.into_iter().nth(array as usize).into_iter().for_each(|array| {
                array[place.clone()].copy_from_slice(bytes);
            });
        })
    }

    /// Returns Some once the image of an awaited shard may be written, and [`Job::fetched`] called. A tier that stores
    /// images has no place for them before this server has made the version of its own shards.
    pub fn check_image(&self, awaited: &Awaited) -> Result<Option<()>, Fault> {
        self.protocol.check_alive()?;
        let (machine, version) = (self.protocol.machine(), awaited.version);
        let is_made = machine.version() >= version && machine.is_made(Step(version.0));
        Ok((self.tier.images.is_none() || is_made).then_some(()))
    }

    /// Notes that all bytes of an awaited shard are written, the older image's too if `has_older`. Returns the updates
    /// that waited for the shard.
    pub fn fetched(&self, awaited: &Awaited, has_older: bool) -> Result<Vec<Work>, Fault> {
        self.protocol.check_alive()?;
        let (owned, version) = (self.protocol.machine().owned_index(awaited.shard)?, awaited.version);
        if !self.awaits(awaited) {
            return Ok(Vec::new());
        }
        let is_exact = self.share.spec.max_delay == 0;
        // A spilled image that was sent lies on the drives by now.
        if !self.share.is_frozen(owned) && (is_exact || !self.images.are_spilled()) {
            let mut image = self.images.to_make(owned, version);
            if is_exact {
                self.round_master(owned, image.overwrite())?;
            }
            self.images.keep(version, ImageAge::Current, image)?;
        }
        let older = Version(version.0.saturating_sub(u64::from(has_older)));
        if has_older && !self.images.are_spilled() {
            self.images.keep(older, ImageAge::Older, self.images.to_make(owned, older))?;
        }
        self.tier.state.seal(owned, version, older)?;
        let works = self.protocol.machine().fetched(owned, version);
        self.protocol.notify();
        Ok(works)
    }
}

fn lost(shard: ShardId, version: Version) -> Fault {
    let remedy = "restore the last checkpoint";
    Fault::new(
        FaultKind::NotFound,
        "version",
        format!("{} of {shard}", version.0),
        "kept for its next owner",
        remedy,
    )
}
