//! Allocator setting that keeps the transport's freed buffers in the process.

use std::{hint::black_box, sync::Once};

/// Largest block whose release raises glibc's thresholds. glibc maps requests above a threshold one by one and trims
/// its heaps above twice that. Freeing a mapped block raises the threshold to its size, up to 32 MiB.
const LARGEST_RAISED_BYTES: usize = 31 * 1024 * 1024;

/// Raises glibc's thresholds; each process that moves chunks calls this once. HTTP/2 reads each DATA frame into
/// memory of its own. With glibc's defaults a frame's pages are unmapped, mapped and cleared again, which costs as
/// much as copying them. Each thread that frees frames may keep 62 MiB for later ones. Other allocators only see a
/// block allocated and freed.
pub fn keep_buffers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| drop(black_box(Vec::<u8>::with_capacity(black_box(LARGEST_RAISED_BYTES)))));
}
