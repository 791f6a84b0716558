//! Receiving a gradient as a server does: chunks are written into their slot with their checksum, and once a shard is whole
//! each of its blocks' sum of squares and first non-finite element are taken. The limit is the same without the latter.

use std::{
    fmt,
    hint::black_box,
    io::{self, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    sync::mpsc,
    thread,
};

use longshore_engine::{
    kernels::{Gradient, Isa, figures},
    threads::Pool,
};
use longshore_proto::{Dtype, checksum::Crc32, limits::CHUNK_BYTES};

use super::update::{Arrays, BLOCK};

/// What one read from a socket may bring.
const RECEIVED: usize = 64 * 1024;

/// Where bytes come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Source {
    /// A buffer in cache, on all threads at once: nothing but the writing.
    Memory,
    /// One connection over loopback, with a thread that sends and one that receives, as a server has; figures are taken
    /// of one shard while the next is received.
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

/// Written into slots. The figures' reading of it is what is measured, and not counted.
pub(super) fn block_bytes(wire: Dtype) -> usize {
    BLOCK * wire.bytes() as usize
}

/// As f16 about 1, as bf16 and f32 about 0.008.
pub(super) fn fill(part: &mut [u16]) {
    part.iter_mut().enumerate().for_each(|(at, bits)| *bits = 0x3C00 | ((at * 40503) >> 7 & 0x7F) as u16);
}

/// Receives every shard; with its figures, where an instruction set for them is given.
pub(super) fn pass(
    arrays: &mut Arrays,
    pool: &Pool,
    source: Source,
    wire: Dtype,
    isa: Option<Isa>,
) -> io::Result<()> {
    let mut values = vec![0u16; CHUNK_BYTES / 2];
    fill(&mut values);
    let chunk: &[u8] = bytemuck::cast_slice(&values);
    let size = wire.bytes() as usize;
    let mut slots: Vec<&mut [u8]> =
        arrays.shards.iter_mut().map(|shard| &mut shard.gradient.bytes_mut()[..shard.len * size]).collect();
    match source {
        Source::Memory => slots.iter_mut().for_each(|slot| {
            copy(pool, &chunk[..RECEIVED], slot);
            take_figures(pool, wire, isa, slot);
        }),
        Source::Tcp => {
            let total = slots.iter().map(|slot| slot.len()).sum();
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            let mut sender = TcpStream::connect(listener.local_addr()?)?;
            let (mut receiver, _) = listener.accept()?;
            let (whole, complete) = mpsc::channel::<&mut [u8]>();
            thread::scope(|scope| {
                let sent = scope.spawn(move || send(&mut sender, chunk, total));
                let received = scope.spawn(move || {
                    slots.into_iter().try_for_each(|slot| {
                        receive(&mut receiver, slot)?;
                        whole.send(slot).map_err(|_| io::ErrorKind::BrokenPipe.into())
                    })
                });
                complete.iter().for_each(|slot| take_figures(pool, wire, isa, slot));
                [sent, received].into_iter().try_for_each(|thread| {
                    thread.join().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))
                })
            })?;
        }
    }
    Ok(())
}

fn copy(pool: &Pool, received: &[u8], slot: &mut [u8]) {
    let chunks: Vec<&mut [u8]> = slot.chunks_mut(CHUNK_BYTES).collect();
    black_box(pool.blocks(chunks, |chunk: &mut [u8]| {
        let mut sum = Crc32::new();
        chunk.chunks_mut(RECEIVED).for_each(|part| sum.copy(&received[..part.len()], part));
        sum.value()
    }));
}

fn send(sender: &mut TcpStream, chunk: &[u8], total: usize) -> io::Result<()> {
    for start in (0..total).step_by(chunk.len()) {
        sender.write_all(&chunk[..chunk.len().min(total - start)])?;
    }
    Ok(())
}

/// As the server below tonic's codec: from the connection's buffer into the slot, with the checksum.
fn receive(receiver: &mut TcpStream, slot: &mut [u8]) -> io::Result<()> {
    let mut buffer = vec![0; RECEIVED];
    for chunk in slot.chunks_mut(CHUNK_BYTES) {
        let (mut sum, mut rest) = (Crc32::new(), chunk);
        while !rest.is_empty() {
            let count = receiver.read(&mut buffer[..RECEIVED.min(rest.len())])?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let (part, after) = rest.split_at_mut(count);
            sum.copy(&buffer[..count], part);
            rest = after;
        }
        black_box(sum.value());
    }
    Ok(())
}

fn take_figures(pool: &Pool, wire: Dtype, isa: Option<Isa>, slot: &[u8]) {
    let Some(isa) = isa else { return };
    let blocks: Vec<&[u8]> = slot.chunks(block_bytes(wire)).collect();
    black_box(pool.blocks(blocks, |block: &[u8]| {
        let gradient = match wire {
            Dtype::F32 => Gradient::F32(bytemuck::cast_slice(block)),
            Dtype::F16 => Gradient::F16(bytemuck::cast_slice(block)),
            Dtype::Bf16 => Gradient::Bf16(bytemuck::cast_slice(block)),
        };
        figures(isa, gradient)
    }));
}
