//! The weights of one version as they arrive. A reader waits for a range, then reads it, on any thread. Tasks of the
//! session fetch the weights.

use std::{collections::BTreeSet, ops::Range, sync::Arc};

use futures_util::future::AbortHandle;
use longshore_memory::Source;
use longshore_proto::{Dtype, Fault, FaultKind, ServerId, ShardId, Slice, Step, Version};
use tracing::debug_span;

use super::{
    Pulls, Reading,
    fetch::Fetch,
    pulls::FeedInner,
    store::{Overwritten, Segment, Store, cut},
};
use crate::{
    cluster::{ByServer, Impatience},
    convert,
    error::{Error, Result},
    host::Instant,
    rank::cause,
};

/// Flat ranges of one version's image that arrive in the background. Clones share the memory. Dropping the last
/// clone returns the memory to the session's pool, and ends a pull that is still under way.
#[derive(Clone)]
pub struct Feed {
    handle: Arc<Handle>,
}

struct Handle {
    shared: Arc<FeedInner>,
    fetches: Vec<AbortHandle>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        for fetch in &self.fetches {
            fetch.abort();
        }
        self.shared.store.empty();
    }
}

/// Flat elements in the memory of a server of this host, and their address in this process.
pub type Lent = (Range<u64>, usize);

impl Feed {
    pub(crate) fn open(pulls: &Arc<Pulls>, reading: Reading, order: &[Range<u64>]) -> Result<Feed> {
        let Pulls { cluster, pool, .. } = &**pulls;
        let dtype = cluster.spec().image_dtype;
        let pieces = cut(&cluster.layout, order)?;
        let step = Step(reading.version().0);
        let owner = |shard| cluster.owner_at(shard, step);
        // Owners are added to the connected servers, since the last holder of a shard may be lost. The feed then waits
        // for that holder.
        let owners = (0..cluster.layout.shards()).map(|shard| owner(ShardId(shard)));
        let servers: BTreeSet<ServerId> = cluster.servers().chain(owners).collect();
        let in_place = ByServer::new(servers, |server| pulls.lends(server));
        let store = Store::new(dtype, &pieces, pool, |shard| in_place[owner(shard)])?;
        let shared = Arc::new(FeedInner::new(pulls.clone(), reading, store));
        let dealt = deal(&in_place, owner, cluster.options.connections, pieces);
        let parts = dealt.into_iter().flat_map(|(server, parts)| {
            parts.into_iter().enumerate().map(move |(connection, pieces)| (server, connection, pieces))
        });
        let version = shared.reading.version();
        let start = |(server, connection, pieces): (ServerId, usize, Pieces)| {
            // Weights read in the server's memory use no bandwidth, so they need no turn.
            let bytes = pieces.iter().map(|(_, range)| (range.end - range.start) * dtype.bytes()).sum();
            let turn = (!in_place[server])
                .then(|| pulls.turns(server, connection).enter(version, bytes, &shared.hurry).into());
            let fetch = Fetch { shared: shared.clone(), server, connection, pieces, turn };
            cluster.runtime.spawn(fetch.run())
        };
        let fetches = parts.filter(|(.., pieces)| !pieces.is_empty()).map(start).collect();
        Ok(Feed { handle: Arc::new(Handle { shared, fetches }) })
    }

    pub fn version(&self) -> Version {
        self.handle.shared.reading.version()
    }

    /// The reading of this feed's weights, for the gradient that is computed with them.
    pub(crate) fn reading(&self) -> &Reading {
        &self.handle.shared.reading
    }

    pub fn dtype(&self) -> Dtype {
        self.handle.shared.store.dtype
    }

    /// Returns true if this feed brings all flat elements of `range`.
    pub(crate) fn covers(&self, range: &Range<u64>) -> bool {
        range.is_empty() || self.handle.shared.store.covering(range).is_some()
    }

    /// Returns true if servers of this host lend all of this feed in their memory. Lent weights are not transferred.
    pub fn is_lent(&self) -> bool {
        self.handle.shared.store.is_lent
    }

    /// Returns true if all flat elements of `range` have arrived. Does not wait.
    pub fn is_ready(&self, range: Range<u64>) -> bool {
        self.handle
            .shared
            .store
            .covering(&range)
            .is_some_and(|segments| segments.iter().all(Segment::is_whole))
    }

    /// Blocks until all flat elements of `range` have arrived.
    ///
    /// # Errors
    /// `TimedOut` naming server, shard and version; `StateLost`; `Invalid` for a range that this feed does not
    /// pull.
    pub fn wait(&self, range: Range<u64>) -> Result<()> {
        self.segments(&range).map(|_| ())
    }

    /// Blocks until the first flat elements of `range` have arrived. Returns the end of the run of elements that have
    /// arrived from there on.
    ///
    /// # Errors
    /// Errors of [`Feed::wait`].
    pub fn wait_for_some(&self, range: Range<u64>) -> Result<u64> {
        let Some(segments) = self.handle.shared.store.covering(&range) else {
            return Err(self.foreign(&range));
        };
        let Some(first) = segments.first() else { return Ok(range.end) };
        self.segments(&(range.start..first.range.end.min(range.end)))?;
        let there = segments.iter().take_while(|segment| segment.is_whole()).last().unwrap_or(first);
        Ok(there.range.end.min(range.end))
    }

    /// Waits for the flat elements of `range`, then converts them to f32. `target` holds exactly as many elements.
    pub fn read(&self, range: Range<u64>, target: &mut [f32]) -> Result<()> {
        self.fits(&range, target.len() as u64, range.end.saturating_sub(range.start))?;
        let dtype = self.dtype();
        self.pieces(range, |at, bytes| {
            let elements = bytes.len() / dtype.bytes() as usize;
            convert::to_f32(dtype, bytes, &mut target[at as usize..at as usize + elements]);
        })
    }

    /// Waits for the flat elements of `range`, then copies their bytes, in the feed's element type.
    pub fn read_raw(&self, range: Range<u64>, target: &mut [u8]) -> Result<()> {
        let size = self.dtype().bytes();
        self.fits(&range, target.len() as u64, range.end.saturating_sub(range.start) * size)?;
        self.sources(range.clone(), |at, bytes| {
            let start = (at * size) as usize;
            bytes.copy_to(&mut target[start..start + bytes.len()]);
        })
    }

    /// Waits for the flat elements of `range`, then passes all their bytes to `visit(elements from the range's start,
    /// bytes)`. Bytes in a server's memory are passed as copies of 16 KiB, which do not change under `visit`.
    ///
    /// # Errors
    /// Errors of [`Feed::wait`]; `Outdated` if a server of this host has overwritten the bytes in its memory. All
    /// visited bytes are then void. A server overwrites a version's bytes once this rank has pushed the whole gradient
    /// of the step after next.
    pub fn pieces(&self, range: Range<u64>, mut visit: impl FnMut(u64, &[u8])) -> Result<()> {
        let size = self.dtype().bytes();
        self.sources(range, |at, bytes| {
            bytes.pieces(|start, piece| visit(at + start as u64 / size, piece));
        })
    }

    /// Visits bytes as [`Feed::pieces`] does, without copies of bytes in a server's memory.
    fn sources(&self, range: Range<u64>, mut visit: impl FnMut(u64, Source<'_, u8>)) -> Result<()> {
        for segment in self.segments(&range)? {
            let start = segment.range.start.max(range.start);
            let read = segment.read(self.within(segment, &range), |bytes| visit(start - range.start, bytes));
            read.map_err(|Overwritten| self.overwritten(segment.shard))?;
        }
        Ok(())
    }

    /// Returns the byte range of a segment that belongs to a flat range.
    fn within(&self, segment: &Segment, range: &Range<u64>) -> Range<usize> {
        let (first, size) = (segment.range.start, self.dtype().bytes());
        let (start, end) = (first.max(range.start), segment.range.end.min(range.end));
        ((start - first) * size) as usize..((end - first) * size) as usize
    }

    /// Waits for the flat elements of `range`, then returns their places in servers' memory, in order. None if some
    /// elements lie elsewhere.
    ///
    /// A reader of these addresses, such as a device that copies them, calls [`Feed::check_lent`] afterwards.
    ///
    /// # Errors
    /// Errors of [`Feed::wait`].
    pub fn addresses(&self, range: Range<u64>) -> Result<Option<Vec<Lent>>> {
        let size = self.dtype().bytes();
        let mut runs: Vec<Lent> = Vec::new();
        for segment in self.segments(&range)? {
            let Some(address) = segment.address(self.within(segment, &range)) else { return Ok(None) };
            let part = segment.range.start.max(range.start)..segment.range.end.min(range.end);
            match runs.last_mut() {
                Some((run, start)) if *start + ((run.end - run.start) * size) as usize == address => {
                    run.end = part.end;
                }
                _ => runs.push((part, address)),
            }
        }
        Ok(Some(runs))
    }

    /// Checks that the reads so far at [`Feed::addresses`] of `range` were valid.
    ///
    /// # Errors
    /// `Outdated` if the server has begun to overwrite them, as with [`Feed::pieces`].
    pub fn check_lent(&self, range: Range<u64>) -> Result<()> {
        for segment in self.segments(&range)? {
            segment.read(0..0, |_| ()).map_err(|Overwritten| self.overwritten(segment.shard))?;
        }
        Ok(())
    }

    /// Returns the cause of an error of this feed: `Fenced` in place of `Outdated`, if a newer process has taken the
    /// rank.
    pub fn cause(&self, error: Error) -> Error {
        cause(&self.handle.shared.pulls.cluster, error)
    }

    /// Returns the error of a reader that was too late. The server has overwritten the weights: this rank, or its
    /// earlier process, has pushed the step after next.
    fn overwritten(&self, shard: ShardId) -> Error {
        let cluster = &self.handle.shared.pulls.cluster;
        let limit = "kept by its server";
        let remedy = "read weights before the step after next that is made of them is pushed to its end";
        let fault = Fault::new(FaultKind::Precondition, "feed.version", self.version(), limit, remedy);
        cluster.outdated(cluster.owner_at(shard, Step(self.version().0)), fault)
    }

    fn foreign(&self, range: &Range<u64>) -> Error {
        let remedy = "name the range when the pull is opened";
        Fault::invalid("feed.range", format!("{range:?}"), "part of this feed", remedy).into()
    }

    fn fits(&self, range: &Range<u64>, given: u64, needed: u64) -> Result<()> {
        if given == needed {
            return Ok(());
        }
        let limit = format!("{needed}, for {range:?}");
        Err(Fault::invalid("feed.target's length", given, limit, "size the target to the range").into())
    }

    /// Waits until the segments of a range are whole, and returns them.
    fn segments(&self, range: &Range<u64>) -> Result<&[Segment]> {
        let shared = &self.handle.shared;
        let Some(segments) = shared.store.covering(range) else { return Err(self.foreign(range)) };
        if segments.iter().all(Segment::is_whole) {
            return Ok(segments);
        }
        shared.hurry.up();
        let start = Instant::now();
        let _stage =
            debug_span!(target: "stage", "wait for weights", version = shared.reading.version().0).entered();
        let cluster = &shared.pulls.cluster;
        let soon = cluster.runtime.block_briefly(shared.whole(segments));
        let waited = soon.unwrap_or_else(|| {
            cluster.runtime.block_on(async {
                let what = format!("the weights of {}", shared.reading.version());
                let whole = cluster.patiently(shared.whole(segments));
                match cluster.watched(&what, whole).await {
                    Ok(result) => result,
                    Err(Impatience::Failed(error)) => Err(error),
                    Err(Impatience::Elapsed(waited)) => Err(shared.late(segments, waited)),
                }
            })
        });
        shared.pulls.meter.held_up(start.elapsed());
        waited.map(|()| segments)
    }
}

/// Slices of a connection, with their flat ranges, in the requested order.
type Pieces = Vec<(Slice, Range<u64>)>;

/// Deals a server's slices to its connections in turn. Every connection then brings the first layers first.
fn deal(
    servers: &ByServer<bool>,
    owner: impl Fn(ShardId) -> ServerId,
    connections: usize,
    pieces: Pieces,
) -> ByServer<Vec<Pieces>> {
    let mut dealt = ByServer::new(servers.ids(), |_| vec![Pieces::new(); connections]);
    let mut turns = ByServer::new(servers.ids(), |_| 0);
    for (slice, range) in pieces {
        let server = owner(slice.shard);
        dealt[server][turns[server] % connections].push((slice, range));
        turns[server] += 1;
    }
    dealt
}
