//! Does what the policy decides: pulls units, copies them into device memory, and frees it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use longshore_proto::Dtype;
use tokio::{sync::Notify, task::AbortHandle};

use super::{
    memory::Memory,
    place::Place,
    policy::{Action, Item, Label, Policy},
};
use crate::{
    device::{Buffer, Device},
    error::{Error, Misuse, Result},
    pipeline::PassWeights,
    pull::{Feed, Pulls},
};

/// How much is asked for ahead at a time: enough to keep links busy, and so little that what is needed at once does not
/// wait long behind it. Two units are in any case.
const WINDOW_BYTES: u64 = 64 << 20;

/// How long the end of copies under way is awaited when all memory is given back.
const COPY_DEADLINE: Duration = Duration::from_secs(10);

/// What all calls and background tasks share.
pub(super) struct Loads {
    pub(super) pulls: Arc<Pulls>,
    pub(super) device: Arc<dyn Device>,
    pub(super) dtype: Dtype,
    pub(super) places: Vec<Place>,
    pub(super) capacity: u64,
    state: Mutex<State>,
    changed: Notify,
    copied: Condvar,
}

pub(super) struct State {
    pub(super) policy: Policy,
    /// Where the weights of the labels come from that passes read now or next.
    pub(super) sources: BTreeMap<Label, PassWeights>,
    loaded: BTreeMap<Item, Loaded>,
    /// Why weights could not be had that somebody may still need.
    failures: BTreeMap<Item, Error>,
    pub(super) memory: Memory,
    /// How many copies to the device are under way.
    copying: usize,
    /// How many loads were begun. Each has its number.
    pub(super) loads: u64,
    pub(super) loaded_bytes: u64,
}

/// Weights in device memory, or on their way there.
struct Loaded {
    number: u64,
    buffer: Buffer,
    /// None once they are there: then the host's memory is free again.
    feed: Option<Feed>,
    task: Option<AbortHandle>,
}

impl Drop for Loaded {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

impl Loads {
    pub(super) fn new(
        pulls: Arc<Pulls>,
        device: Arc<dyn Device>,
        dtype: Dtype,
        places: Vec<Place>,
        capacity: u64,
    ) -> Loads {
        let sizes: Vec<u64> = places.iter().map(|place| place.elements * dtype.bytes()).collect();
        let window = WINDOW_BYTES.max(2 * sizes.iter().max().copied().unwrap_or(0));
        let policy = Policy::new(sizes, capacity, window);
        let memory = Memory::new(device.clone(), capacity);
        let state = State {
            policy,
            sources: BTreeMap::new(),
            loaded: BTreeMap::new(),
            failures: BTreeMap::new(),
            memory,
            copying: 0,
            loads: 0,
            loaded_bytes: 0,
        };
        Loads {
            pulls,
            device,
            dtype,
            places,
            capacity,
            state: Mutex::new(state),
            changed: Notify::new(),
            copied: Condvar::new(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under this lock would be a defect of the policy, whose state changes before anything is done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all actions. What could not be asked for is asked for again when it is needed.
    ///
    /// # Errors
    /// Why `needed` could not be asked for. Another unit's failure is no one's yet.
    pub(super) fn perform(
        self: &Arc<Self>,
        state: &mut State,
        actions: Vec<Action>,
        needed: Option<Item>,
    ) -> Result<()> {
        let mut result = Ok(());
        for action in actions {
            match action {
                Action::Drop(item) => {
                    state.failures.remove(&item);
                    if let Some(loaded) = state.loaded.remove(&item) {
                        state.memory.give_back(loaded.buffer.clone());
                    }
                }
                Action::Load(item) => {
                    let Err(error) = self.load(state, item) else { continue };
                    state.policy.failed(item);
                    if needed == Some(item) {
                        result = Err(error);
                    } else {
                        tracing::debug!(unit = self.places[item.unit].unit.name, %error, "not asked for ahead");
                    }
                }
            }
        }
        result
    }

    fn load(self: &Arc<Self>, state: &mut State, item: Item) -> Result<()> {
        let place = &self.places[item.unit];
        let bytes = place.elements * self.dtype.bytes();
        let Some(source) = state.sources.get(&item.label) else {
            return Err(Misuse("no pass of this version was begun").into());
        };
        let feed = source.pull(&self.pulls, &place.ranges, self.dtype)?;
        let buffer = state.memory.take(bytes)?;
        state.failures.remove(&item);
        state.loads += 1;
        state.loaded_bytes += bytes;
        let number = state.loads;
        let (loads, arriving) = (self.clone(), feed.clone());
        let task = self.pulls.cluster().runtime.spawn(async move {
            let mut arrived = Ok(());
            for range in &loads.places[item.unit].ranges {
                if arrived.is_ok() {
                    arrived = arriving.arrived(range).await;
                }
            }
            // A copy blocks, which is for threads of their own.
            tokio::task::spawn_blocking(move || {
                loads.arrive((item, number), arrived.map(|()| arriving));
            });
        });
        state.loaded.insert(item, Loaded { number, buffer, feed: Some(feed), task: Some(task) });
        Ok(())
    }

    /// Copies weights that have arrived into device memory, unless they are not wanted any more.
    fn arrive(self: &Arc<Self>, (item, number): (Item, u64), arrived: Result<Feed>) {
        let mut state = self.lock();
        let current = state.loaded.get(&item).filter(|loaded| loaded.number == number);
        let Some(buffer) = current.map(|loaded| loaded.buffer.clone()) else { return };
        let copied = match arrived {
            Ok(feed) => {
                state.policy.arriving(item);
                state.copying += 1;
                drop(state);
                let copied = self.copy(item.unit, &feed, &buffer);
                drop(feed);
                state = self.lock();
                state.copying -= 1;
                copied
            }
            Err(error) => Err(error),
        };
        let actions = match copied {
            Ok(()) => {
                // Memory that is given up here must not live on in this clone.
                drop(buffer);
                if let Some(loaded) = state.loaded.get_mut(&item) {
                    (loaded.feed, loaded.task) = (None, None);
                }
                state.policy.arrived(item)
            }
            Err(error) => {
                state.policy.failed(item);
                state.loaded.remove(&item);
                state.memory.give_back(buffer);
                state.failures.insert(item, error);
                Vec::new()
            }
        };
        if let Err(error) = self.perform(&mut state, actions, None) {
            tracing::debug!(%error, "nothing is asked for ahead");
        }
        drop(state);
        self.copied.notify_all();
        self.changed.notify_waiters();
    }

    fn copy(&self, unit: usize, feed: &Feed, buffer: &Buffer) -> Result<()> {
        let mut host = self.lock().memory.take_host(buffer.bytes())?;
        let mut start = 0;
        for range in &self.places[unit].ranges {
            let end = start + ((range.end - range.start) * self.dtype.bytes()) as usize;
            feed.read_raw(range.clone(), &mut host[start..end])?;
            start = end;
        }
        let host = self.device.copy_in(host, buffer, 0)?.wait()?;
        let freed = self.lock().memory.give_back_host(host);
        drop(freed);
        Ok(())
    }

    /// The memory of weights that are there.
    pub(super) fn buffer(state: &State, item: Item) -> Option<Buffer> {
        state.loaded.get(&item).filter(|loaded| loaded.feed.is_none()).map(|loaded| loaded.buffer.clone())
    }

    /// What brings weights that are on their way.
    pub(super) fn feed(state: &State, item: Item) -> Option<Feed> {
        state.loaded.get(&item).and_then(|loaded| loaded.feed.clone())
    }

    /// Why weights could not be had. It is told once.
    pub(super) fn failure(state: &mut State, item: Item) -> Option<Error> {
        state.failures.remove(&item)
    }

    /// Returns once some load has ended since `seen` was said of the state.
    pub(super) async fn until(&self, seen: impl Fn(&State) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if seen(&self.lock()) {
                return;
            }
            changed.await;
        }
    }

    /// Gives all memory back and ends the background tasks, after the copies that are under way.
    pub(super) fn clear(&self) {
        let mut state = self.lock();
        state.sources.clear(); // nothing is asked for from now on
        let waited = self.copied.wait_timeout_while(state, COPY_DEADLINE, |state| state.copying > 0);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let loaded = std::mem::take(&mut state.loaded);
        drop(state);
        drop(loaded);
    }
}
