//! A simulated disk, which records every write and flush. Tests can fail the power at each of them, or a
//! single write.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, mpsc},
    thread,
};

use longshore_engine::io::{Direction, Disk, OpenDisk, Request};

use crate::common::Noise;

/// The largest unit that a device writes whole during a power failure.
const SECTOR: usize = 512;

#[derive(Clone, Debug)]
pub(crate) enum Event {
    Write { path: PathBuf, offset: u64, bytes: Arc<Vec<u8>> },
    Flush { path: PathBuf },
}

/// A disk's bytes, sparse, by offset in steps of 4 KiB.
pub(crate) type Image = BTreeMap<PathBuf, BTreeMap<u64, Vec<u8>>>;

#[derive(Default)]
struct DiskState {
    events: Vec<Event>,
    image: Image,
    /// The write to fail (counted from 1), and its error.
    fail_write: Option<(usize, io::ErrorKind)>,
    fail_flush: Option<usize>,
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

pub(crate) fn apply(image: &mut Image, path: &Path, offset: u64, bytes: &[u8]) {
    let file = image.entry(path.to_path_buf()).or_default();
    for (index, part) in bytes.chunks(4096).enumerate() {
        let at = offset + (index * 4096) as u64;
        assert!(at.is_multiple_of(4096) && part.len() == 4096, "unaligned write at {offset}");
        file.insert(at, part.to_vec());
    }
}

fn look(image: &Image, path: &Path, offset: u64, bytes: &mut [u8]) {
    let empty = BTreeMap::new();
    let file = image.get(path).unwrap_or(&empty);
    for (index, part) in bytes.chunks_mut(4096).enumerate() {
        match file.get(&(offset + (index * 4096) as u64)) {
            Some(page) => part.copy_from_slice(page),
            None => part.fill(0),
        }
    }
}

impl Disks {
    /// A host whose disks hold `image`.
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
        pages.iter().find_map(|(&at, found)| (found == page).then_some(at))
    }

    /// Flips a bit of the file whose path ends in `file`.
    pub(crate) fn flip(&self, file: &str, at: u64, bit: u32) {
        let mut state = self.state.lock().unwrap();
        let of = state.image.iter_mut().find(|(path, _)| path.ends_with(file)).expect("written").1;
        of.get_mut(&(at & !4095)).expect("written")[(at % 4096) as usize] ^= 1 << bit;
    }

    pub(crate) fn fail_write(&self, after: usize, kind: io::ErrorKind) {
        let mut state = self.state.lock().unwrap();
        state.fail_write = Some((state.writes + after, kind));
    }

    pub(crate) fn fail_flush(&self, after: usize) {
        let mut state = self.state.lock().unwrap();
        state.fail_flush = Some(state.flushes + after);
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
            apply(&mut state.image, path, part.offset, bytes);
            let bytes = Arc::new(bytes.to_vec());
            state.events.push(Event::Write { path: path.to_path_buf(), offset: part.offset, bytes });
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
        let zeros = vec![0; (range.end - range.start) as usize];
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
    /// Some writes are there and others are not, in any order.
    Some,
    /// Any sectors of each write are there.
    Torn,
    /// Writes are torn, and sectors in flight hold neither the old bytes nor the new ones.
    Garbled,
    Kept,
}

/// Returns the disks after a power failure behind the first `count` events. `before` is their content before
/// the events.
pub(crate) fn crash(before: &Image, events: &[Event], count: usize, failure: Failure, seed: u64) -> Image {
    let mut noise = Noise(seed);
    let mut image = before.clone();
    let flushed = |index: usize, of: &Path| {
        events[index..count].iter().any(|event| matches!(event, Event::Flush { path } if path == of))
    };
    let mut pending = Vec::new();
    for (index, event) in events[..count].iter().enumerate() {
        let Event::Write { path, offset, bytes } = event else { continue };
        if flushed(index, path) {
            apply(&mut image, path, *offset, bytes);
        } else {
            pending.push((path, *offset, bytes));
        }
    }
    // Writes in flight together have no order, so they are shuffled.
    for index in (1..pending.len()).rev() {
        pending.swap(index, noise.below(index + 1));
    }
    for (path, offset, bytes) in pending {
        let kept = match failure {
            Failure::Lost => continue,
            Failure::Kept => bytes.to_vec(),
            Failure::Some if noise.one_in(2) => continue,
            Failure::Some => bytes.to_vec(),
            Failure::Torn | Failure::Garbled => {
                let mut under = vec![0; bytes.len()];
                look(&image, path, offset, &mut under);
                for (target, source) in under.chunks_mut(SECTOR).zip(bytes.chunks(SECTOR)) {
                    match noise.below(3) {
                        0 => target.copy_from_slice(source),
                        1 if matches!(failure, Failure::Garbled) => {
                            target.iter_mut().for_each(|byte| *byte = noise.next() as u8);
                        }
                        _ => {}
                    }
                }
                under
            }
        };
        apply(&mut image, path, offset, &kept);
    }
    image
}
