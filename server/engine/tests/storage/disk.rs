//! A simulated disk, which records every write and flush. A test can fail a single write, or the power at any of these
//! events.

use std::{
    collections::BTreeMap,
    io,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

use longshore_engine::io::{Direction, Disk, OpenDisk, Request};

use crate::common::Noise;

/// The largest unit that a device still writes whole when the power fails.
const SECTOR: usize = 512;
const PAGE: usize = 4096;

/// A page of a file. Images and events share pages, so an image copies no bytes.
type Page = Arc<[u8; PAGE]>;

#[derive(Clone, Debug)]
pub(crate) enum Event {
    Write { path: PathBuf, offset: u64, pages: Vec<Page> },
    Flush { path: PathBuf },
}

/// The written pages of each file, by their offset.
pub(crate) type Image = BTreeMap<PathBuf, BTreeMap<u64, Page>>;

#[derive(Default)]
struct DiskState {
    events: Vec<Event>,
    image: Image,
    /// Number of the write that fails, counted from 1, and its error.
    fail_write: Option<(usize, io::ErrorKind)>,
    fail_flush: Option<usize>,
    /// Folder of a drive whose writes each take some time.
    slow: Option<(PathBuf, Duration)>,
    writes: usize,
    flushes: usize,
    read_bytes: usize,
}

#[derive(Clone, Default)]
pub(crate) struct Disks {
    state: Arc<Mutex<DiskState>>,
}

struct Simulated {
    path: PathBuf,
    disks: Disks,
    queue: mpsc::Sender<Request>,
}

fn apply(image: &mut Image, path: &Path, offset: u64, pages: &[Page]) {
    let file = image.entry(path.to_path_buf()).or_default();
    file.extend((offset..).step_by(PAGE).zip(pages.iter().cloned()));
}

fn pages_of(offset: u64, bytes: &[u8]) -> Vec<Page> {
    let (pages, rest) = bytes.as_chunks();
    assert!(rest.is_empty() && offset.is_multiple_of(PAGE as u64), "unaligned write at {offset}");
    pages.iter().map(|page| Arc::new(*page)).collect()
}

fn look(image: &Image, path: &Path, offset: u64, bytes: &mut [u8]) {
    let empty = BTreeMap::new();
    let file = image.get(path).unwrap_or(&empty);
    for (at, part) in (offset..).step_by(PAGE).zip(bytes.chunks_mut(PAGE)) {
        match file.get(&at) {
            Some(page) => part.copy_from_slice(&**page),
            None => part.fill(0),
        }
    }
}

/// Flips a bit of a page, if the page was written.
pub(crate) fn flip(file: &mut BTreeMap<u64, Page>, at: u64, bit: u32) -> Option<()> {
    let page = file.get_mut(&(at - at % PAGE as u64))?;
    Arc::make_mut(page)[at as usize % PAGE] ^= 1 << bit;
    Some(())
}

impl Disks {
    /// Returns a host whose disks hold `image`.
    pub(crate) fn with(image: Image) -> Disks {
        let disks = Disks::default();
        disks.state.lock().unwrap().image = image;
        disks
    }

    pub(crate) fn read_bytes(&self) -> usize {
        self.state.lock().unwrap().read_bytes
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.state.lock().unwrap().events.clone()
    }

    pub(crate) fn image(&self) -> Image {
        self.state.lock().unwrap().image.clone()
    }

    /// Returns a page's offset in the file whose path ends in `file`.
    pub(crate) fn find(&self, file: &str, page: &[u8]) -> Option<u64> {
        let state = self.state.lock().unwrap();
        let (_, pages) = state.image.iter().find(|(path, _)| path.ends_with(file))?;
        pages.iter().find_map(|(&at, found)| (**found == *page).then_some(at))
    }

    /// Flips a bit of the file whose path ends in `file`.
    pub(crate) fn flip(&self, file: &str, at: u64, bit: u32) {
        let mut state = self.state.lock().unwrap();
        let of = state.image.iter_mut().find(|(path, _)| path.ends_with(file)).expect("written").1;
        self::flip(of, at, bit).expect("written");
    }

    pub(crate) fn fail_write(&self, after: usize, kind: io::ErrorKind) {
        let mut state = self.state.lock().unwrap();
        state.fail_write = Some((state.writes + after, kind));
    }

    pub(crate) fn fail_flush(&self, after: usize) {
        let mut state = self.state.lock().unwrap();
        state.fail_flush = Some(state.flushes + after);
    }

    pub(crate) fn slow_writes(&self, folder: &Path, each: Duration) {
        self.state.lock().unwrap().slow = Some((folder.to_path_buf(), each));
    }

    fn start(&self, path: &Path) -> Arc<dyn Disk> {
        let (queue, inbox) = mpsc::channel::<Request>();
        let (disks, of_thread) = (self.clone(), path.to_path_buf());
        thread::spawn(move || {
            while let Ok(mut request) = inbox.recv() {
                let result = disks.perform(&of_thread, &mut request);
                (request.done)(request.buffer, result);
            }
        });
        Arc::new(Simulated { path: path.to_path_buf(), disks: self.clone(), queue })
    }

    fn perform(&self, path: &Path, request: &mut Request) -> io::Result<()> {
        let slow = self.state.lock().unwrap().slow.clone();
        if let Some((folder, each)) = slow
            && request.direction == Direction::Write
            && path.starts_with(folder)
        {
            thread::sleep(each);
        }
        for part in &request.parts {
            let mut state = self.state.lock().unwrap();
            let bytes = &mut request.buffer.bytes_mut()[part.range.clone()];
            if request.direction == Direction::Read {
                look(&state.image, path, part.offset, bytes);
                state.read_bytes += part.range.len();
                continue;
            }
            state.writes += 1;
            let writes = state.writes;
            if let Some((_, kind)) = state.fail_write.take_if(|(at, _)| *at == writes) {
                return Err(kind.into());
            }
            let pages = pages_of(part.offset, bytes);
            apply(&mut state.image, path, part.offset, &pages);
            state.events.push(Event::Write { path: path.to_path_buf(), offset: part.offset, pages });
        }
        Ok(())
    }
}

impl OpenDisk for Disks {
    fn create(&self, path: &Path) -> io::Result<Arc<dyn Disk>> {
        self.state.lock().unwrap().image.remove(path);
        Ok(self.start(path))
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn Disk>> {
        Ok(self.start(path))
    }
}

impl Disk for Simulated {
    fn path(&self) -> &Path {
        &self.path
    }

    fn reserve(&self, _: std::ops::Range<u64>) -> io::Result<()> {
        Ok(())
    }

    fn give_back(&self, range: std::ops::Range<u64>) -> io::Result<()> {
        let zero = Arc::new([0; PAGE]);
        let zeros = vec![zero; (range.end - range.start) as usize / PAGE];
        apply(&mut self.disks.state.lock().unwrap().image, &self.path, range.start, &zeros);
        Ok(())
    }

    fn submit(&self, request: Request) {
        self.queue.send(request).unwrap();
    }

    fn flush(&self) -> io::Result<()> {
        let mut state = self.disks.state.lock().unwrap();
        state.flushes += 1;
        let flushes = state.flushes;
        if state.fail_flush.take_if(|at| *at == flushes).is_some() {
            return Err(io::Error::other("injected"));
        }
        state.events.push(Event::Flush { path: self.path.clone() });
        Ok(())
    }
}

/// The fate of unflushed writes when the power fails.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Failure {
    Lost,
    /// Some writes are there, and earlier ones may be missing.
    Some,
    /// Each write may be there with only some of its sectors.
    Torn,
    /// Writes are torn. Sectors that were just being written hold neither the old nor the new bytes.
    Garbled,
    Kept,
}

impl Failure {
    const ALL: [Failure; 5] = [Failure::Torn, Failure::Garbled, Failure::Some, Failure::Lost, Failure::Kept];
}

/// Runs `check` on the disks after power failures: of each kind, after each of these numbers of events, for each seed.
/// Equal disks with the same `promise` are checked only once.
pub(crate) fn each_crash<P: PartialEq + Copy>(
    (before, events): (&Image, &[Event]),
    counts: RangeInclusive<usize>,
    seeds: u64,
    promise: impl Fn(usize) -> P,
    mut check: impl FnMut(usize, Failure, P, Image),
) {
    let mut checked: Vec<(P, Image)> = Vec::new();
    for count in counts {
        let mut here: Vec<(P, Image)> = Vec::new();
        for (seed, failure) in (0..seeds).flat_map(|seed| Failure::ALL.map(|failure| (seed, failure))) {
            let seed = count as u64 * 10 + seed * 5 + failure as u64;
            let found = (promise(count), crash(before, events, count, failure, seed));
            if checked.contains(&found) {
                here.push(found);
            } else if !here.contains(&found) {
                check(count, failure, found.0, found.1.clone());
                here.push(found);
            }
        }
        checked = here;
    }
}

/// Returns the disks after a power failure behind the first `count` events. `before` has the disks' content before all
/// events.
pub(crate) fn crash(before: &Image, events: &[Event], count: usize, failure: Failure, seed: u64) -> Image {
    let mut noise = Noise(seed);
    let mut image = before.clone();
    let flushed = |index: usize, of: &Path| {
        events[index..count].iter().any(|event| matches!(event, Event::Flush { path } if path == of))
    };
    let mut pending = Vec::new();
    for (index, event) in events[..count].iter().enumerate() {
        let Event::Write { path, offset, pages } = event else { continue };
        if flushed(index, path) {
            apply(&mut image, path, *offset, pages);
        } else {
            pending.push((path, *offset, pages));
        }
    }
    // Writes that are in flight together have no order, so their order is random.
    for index in (1..pending.len()).rev() {
        pending.swap(index, noise.below(index + 1));
    }
    for (path, offset, pages) in pending {
        match failure {
            Failure::Lost => {}
            Failure::Some if noise.one_in(2) => {}
            Failure::Some | Failure::Kept => apply(&mut image, path, offset, pages),
            Failure::Torn | Failure::Garbled => {
                let mut under = vec![0; pages.len() * PAGE];
                look(&image, path, offset, &mut under);
                let sectors = pages.iter().flat_map(|page| page.chunks(SECTOR));
                for (target, source) in under.chunks_mut(SECTOR).zip(sectors) {
                    match noise.below(3) {
                        0 => target.copy_from_slice(source),
                        1 if matches!(failure, Failure::Garbled) => {
                            target.iter_mut().for_each(|byte| *byte = noise.next() as u8);
                        }
                        _ => {}
                    }
                }
                apply(&mut image, path, offset, &pages_of(offset, &under));
            }
        }
    }
    image
}
