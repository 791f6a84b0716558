//! Receives a gradient as a server does. Chunks arrive in their slot; while a part is in cache, its checksum and
//! its blocks' gradient statistics are taken. The limit does the same without statistics.

use std::{
    fmt,
    hint::black_box,
    io::{self, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    thread,
};

use longshore_engine::{
    kernels::{Isa, statistics},
    threads::ThreadPool,
};
use longshore_proto::{Dtype, checksum::Crc32, limits::CHUNK_BYTES};

use super::arrays::{Arrays, BLOCK, fill_gradient, gradient_of};

/// The most bytes of one read from a socket, as in a server.
const RECEIVED: usize = 256 * 1024;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Source {
    /// A buffer in cache, on all threads at once: the pass measures writing alone.
    Memory,
    /// Connections over loopback. Every two threads of the pool become a receiver and a sender, which stands for
    /// the worker.
    Tcp,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Memory => "memory",
            Source::Tcp => "tcp",
        })
    }
}

/// Bytes written into a slot for each block. Statistics read them once more; this read is the measured cost, so it
/// is not counted.
pub(super) fn block_bytes(wire: Dtype) -> usize {
    BLOCK * wire.bytes() as usize
}

/// Receives every shard, with its statistics if an instruction set is given.
pub(super) fn pass(
    arrays: &mut Arrays,
    pool: &ThreadPool,
    source: Source,
    wire: Dtype,
    isa: Option<Isa>,
) -> io::Result<()> {
    let mut values = vec![0u16; CHUNK_BYTES / 2];
    fill_gradient(&mut values);
    let chunk: &[u8] = bytemuck::cast_slice(&values);
    let size = wire.bytes() as usize;
    let slots: Vec<&mut [u8]> =
        arrays.shards.iter_mut().map(|shard| &mut shard.gradient.bytes_mut()[..shard.len * size]).collect();
    match source {
        Source::Memory => slots.into_iter().for_each(|slot| {
            let chunks = slot.chunks_mut(CHUNK_BYTES).collect();
            pool.blocks(chunks, |place: &mut [u8]| copy(&chunk[..RECEIVED], place, wire, isa));
        }),
        Source::Tcp => {
            let count = pool.threads().div_ceil(2);
            let mut connections: Vec<Vec<&mut [u8]>> = (0..count).map(|_| Vec::new()).collect();
            for (shard, slot) in slots.into_iter().enumerate() {
                connections[shard % count].push(slot);
            }
            thread::scope(|scope| {
                let mut threads = Vec::new();
                for slots in connections {
                    let (mut sender, mut receiver) = connect()?;
                    let total = slots.iter().map(|slot| slot.len()).sum();
                    threads.push(scope.spawn(move || send(&mut sender, chunk, total)));
                    threads.push(scope.spawn(move || {
                        slots.into_iter().try_for_each(|slot| receive(&mut receiver, slot, wire, isa))
                    }));
                }
                threads.into_iter().try_for_each(|thread| {
                    thread.join().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))
                })
            })?;
        }
    }
    Ok(())
}

fn copy(received: &[u8], chunk: &mut [u8], wire: Dtype, isa: Option<Isa>) {
    let mut sum = Crc32::new();
    for part in chunk.chunks_mut(received.len()) {
        sum.copy(&received[..part.len()], part);
        take_statistics(wire, isa, part);
    }
    black_box(sum.value());
}

fn connect() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let sender = TcpStream::connect(listener.local_addr()?)?;
    Ok((sender, listener.accept()?.0))
}

fn send(sender: &mut TcpStream, chunk: &[u8], total: usize) -> io::Result<()> {
    for start in (0..total).step_by(chunk.len()) {
        sender.write_all(&chunk[..chunk.len().min(total - start)])?;
    }
    Ok(())
}

fn receive(receiver: &mut TcpStream, slot: &mut [u8], wire: Dtype, isa: Option<Isa>) -> io::Result<()> {
    for chunk in slot.chunks_mut(CHUNK_BYTES) {
        let (mut sum, mut start, mut taken) = (Crc32::new(), 0, 0);
        while start < chunk.len() {
            let most = RECEIVED.min(chunk.len() - start);
            let count = receiver.read(&mut chunk[start..start + most])?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            sum.update(&chunk[start..start + count]);
            start += count;
            let whole = start - start % block_bytes(wire);
            take_statistics(wire, isa, &chunk[taken..whole]);
            taken = whole;
        }
        black_box(sum.value());
    }
    Ok(())
}

fn take_statistics(wire: Dtype, isa: Option<Isa>, received: &[u8]) {
    let Some(isa) = isa else { return };
    for block in received.chunks(block_bytes(wire)) {
        black_box(statistics(isa, gradient_of(wire, block)));
    }
}
