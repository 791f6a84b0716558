//! Keeps the allocator from giving the transport's buffers back to the kernel after each frame.

use std::{hint::black_box, sync::Once};

/// The largest block whose release raises glibc's thresholds. glibc maps requests above a threshold one by one and
/// trims its heaps above twice that; freeing a mapped block raises the threshold to its size, up to 32 MiB.
const LARGEST_RAISED_BYTES: usize = 31 * 1024 * 1024;

/// Must be called once by each process that moves chunks. HTTP/2 reads each DATA frame into memory of its own. With
/// glibc's defaults a frame's pages are unmapped, mapped and cleared again, which costs as much as copying them. Each
/// thread that frees frames may keep 62 MiB for the next ones. Other allocators just see a block come and go.
pub fn keep_buffers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| drop(black_box(Vec::<u8>::with_capacity(black_box(LARGEST_RAISED_BYTES)))));
}
