//! Pulls of weights on a drive, compared with the drive's own loop of the same reads and with pulls from
//! memory.

use std::{
    path::Path,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use longshore_engine::{
    io::{Direction, Disk, OpenDisk, OpenFile, Part, Request},
    memory::{Region, Slab},
};
use longshore_proto::{JobSpec, Rank, TierKind, limits::CHUNK_BYTES};
use longshore_tests::server::{Longshored, ServerOptions};
use longshore_worker::{Options, Session, Transport, session::Probe};
use tempfile::TempDir;

use super::{Case, ROUNDS, alone, weights};

/// Number of reads in flight in the bare loop. More were no faster.
const AT_ONCE: usize = 8;

/// A file on the drive, and buffers to read it.
struct Reads {
    disk: Arc<dyn Disk>,
    free: Vec<Region>,
    chunks: usize,
}

impl Reads {
    fn create(folder: &Path, bytes: u64) -> Reads {
        let free = Slab::allocate(AT_ONCE * CHUNK_BYTES).expect("memory").carve_here(&[CHUNK_BYTES; AT_ONCE]);
        let disk = OpenFile::default().create(&folder.join("reads")).expect("a file");
        disk.reserve(0..bytes).expect("space");
        let mut reads = Reads { disk, free, chunks: bytes as usize / CHUNK_BYTES };
        // Blocks reserved and never written are not on the drive.
        reads.pass(Direction::Write);
        reads.disk.flush().expect("a flush");
        reads
    }

    /// Moves all chunks once. Returns the seconds.
    fn pass(&mut self, direction: Direction) -> f64 {
        let begun = Instant::now();
        let (done, results) = mpsc::channel();
        let (mut next, mut busy) = (0, 0);
        while next < self.chunks || busy > 0 {
            if next < self.chunks
                && let Some(buffer) = self.free.pop()
            {
                let parts = vec![Part { offset: (next * CHUNK_BYTES) as u64, range: 0..CHUNK_BYTES }];
                let done = done.clone();
                let done =
                    Box::new(move |buffer, result: std::io::Result<()>| drop(done.send((buffer, result))));
                self.disk.submit(Request { direction, parts, buffer, done });
                (next, busy) = (next + 1, busy + 1);
                continue;
            }
            let (buffer, result) = results.recv().expect("a request that is done");
            result.expect("a read or a write");
            self.free.push(buffer);
            busy -= 1;
        }
        begun.elapsed().as_secs_f64()
    }
}

/// A rank that pulls version 0 of a job whose second rank never comes. The job therefore stays at version 0.
struct Puller {
    probe: Probe,
    elements: u64,
    _server: Longshored,
}

impl Puller {
    fn start(case: &Case, tier: TierKind, server: Longshored) -> Puller {
        let spec = JobSpec { tier, world_size: 2, ..case.spec() };
        let options = Options {
            slow_deadline: Duration::from_secs(300),
            transport: Transport::Tcp,
            ..Options::new(vec![server.address().to_string()], spec, Rank(0))
        };
        let mut session = Session::connect(options).expect("a session");
        session.start(&|_| weights()).expect("a job");
        let elements = session.layout().elements();
        Puller { probe: Probe::new(session).expect("a probe"), elements, _server: server }
    }

    /// Pulls all weights. Returns the seconds.
    fn pull(&self) -> f64 {
        let begun = Instant::now();
        self.probe.pull().expect("a pull").wait(0..self.elements).expect("weights");
        begun.elapsed().as_secs_f64()
    }
}

/// All but the image window's 48 MiB come from the drive.
#[test]
fn weights_are_pulled_from_the_drive() {
    let Some(_alone) = alone() else { return };
    let root = TempDir::new().expect("a folder for state");
    let case = Case { params: 60, resident: 0, ..Case::small(&["--spill", "all"]) };
    let bytes = case.elements() * 2;
    let spilled = Puller::start(&case, TierKind::Nvme, case.start(&root));
    let memory = Puller::start(&case, TierKind::Memory, ServerOptions::new().memory("8GiB").start());
    let mut drive = Reads::create(root.path(), bytes);
    let mut rounds = Vec::new();
    for _ in 0..=ROUNDS {
        let [drive, spilled, memory] = [drive.pass(Direction::Read), spilled.pull(), memory.pull()]
            .map(|seconds| bytes as f64 / seconds / 1e9);
        eprintln!(
            "pulls from the drive {spilled:.2} GB/s, {:.2} of the drive's {drive:.2}, {:.2} of pulls from memory {memory:.2}",
            spilled / drive,
            spilled / memory
        );
        rounds.push(spilled / drive.min(memory));
    }
    // The first round warms up.
    let mut ratios = rounds.split_off(1);
    ratios.sort_by(f64::total_cmp);
    eprintln!("median {:.2} of the slower of both", ratios[ROUNDS / 2]);
}
