//! A bare loop of a step's reads and writes on a drive, with as many requests at once. The loop shows the
//! drive's own limit.

use std::{
    io,
    path::Path,
    sync::{Arc, mpsc},
    time::Instant,
};

use longshore_engine::{
    io::{Direction, Disk, OpenDisk, OpenFile, Part, Request},
    memory::{Region, Slab},
};

/// Number of shards in buffers at once, as in the server.
const BUFFERS: usize = 6;

/// The bare loop and its file.
pub(super) struct Drive {
    disk: Arc<dyn Disk>,
    free: Vec<Region>,
    /// The slot of the last pass.
    slot: usize,
    shards: usize,
    /// Number of shards that stay in memory.
    resident: usize,
    /// Bytes read and written of each shard.
    read: usize,
    written: usize,
}

impl Drive {
    pub(super) fn create(
        folder: &Path,
        shards: usize,
        resident: usize,
        [read, written]: [usize; 2],
    ) -> Drive {
        let most = read.max(written);
        let slab = Slab::allocate(BUFFERS * most).expect("memory");
        let free = slab.carve_here(&[most; BUFFERS]);
        let bytes = 2 * (shards * most) as u64;
        let disk = OpenFile::default().create(&folder.join("bare")).expect("a file");
        disk.reserve(0..bytes).expect("space");
        let mut drive = Drive { disk, free, slot: 0, shards, resident, read, written };
        // The first write to reserved blocks costs the file system more.
        for _ in 0..2 {
            drive.pass();
        }
        drive
    }

    /// Reads the shards that are not resident from one slot, and writes all shards of the other. Returns
    /// seconds and bytes.
    pub(super) fn pass(&mut self) -> (f64, u64) {
        let (from, to) = (self.slot, 1 - self.slot);
        let (shards, resident) = (self.shards, self.resident);
        let begun = Instant::now();
        let (done, results) = mpsc::channel();
        let (mut next, mut busy, mut bytes) = (0, 0, 0);
        while next < shards || busy > 0 {
            if next < shards
                && let Some(buffer) = self.free.pop()
            {
                let stays = (next + 1) * resident / shards > next * resident / shards;
                let (direction, slot) = if stays { (Direction::Write, to) } else { (Direction::Read, from) };
                self.submit(next, direction, slot, buffer, &done);
                (next, busy) = (next + 1, busy + 1);
                continue;
            }
            let (shard, direction, buffer, result) = results.recv().expect("a request that is done");
            Result::expect(result, "a read or a write");
            bytes += self.length(direction) as u64;
            if direction == Direction::Read {
                self.submit(shard, Direction::Write, to, buffer, &done);
            } else {
                self.free.push(buffer);
                busy -= 1;
            }
        }
        self.disk.flush().expect("a flush");
        self.slot = to;
        (begun.elapsed().as_secs_f64(), bytes)
    }

    fn length(&self, direction: Direction) -> usize {
        if direction == Direction::Read { self.read } else { self.written }
    }

    fn submit(
        &self,
        shard: usize,
        direction: Direction,
        slot: usize,
        buffer: Region,
        done: &mpsc::Sender<Moved>,
    ) {
        let offset = (slot * self.shards + shard) * self.read.max(self.written);
        let parts = vec![Part { offset: offset as u64, range: 0..self.length(direction) }];
        let done = done.clone();
        let done = Box::new(move |buffer, result| drop(done.send((shard, direction, buffer, result))));
        self.disk.submit(Request { direction, parts, buffer, done });
    }
}

type Moved = (usize, Direction, Region, io::Result<()>);
