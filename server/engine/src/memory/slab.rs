//! One anonymous mapping for all buffers of a kind, cut into exclusive regions.

use std::{fs, sync::Arc, sync::Once};

use memmap2::{Advice, MmapMut, MmapOptions};

use super::Region;

/// Regions start on cache lines, so that no two share one.
const REGION_ALIGN: usize = 64;
/// First touch costs most of an allocation (about 2 GB/s against 40 GB/s for the second), so below this many bytes a
/// second thread does not pay.
const HUGE_PAGE_BYTES: usize = 2 * 1024 * 1024;

#[derive(Debug, thiserror::Error)]
#[error(
    "could not allocate {bytes} bytes: {source}. Lower the memory budget or raise the container's memory limit"
)]
pub struct AllocationError {
    pub bytes: usize,
    pub source: std::io::Error,
}

/// A mapping that has not been cut yet.
pub struct Slab {
    map: MmapMut,
}

impl Slab {
    /// Bytes that regions of these sizes take together. What [`Slab::carve`] will need.
    pub fn bytes_for(sizes: impl IntoIterator<Item = usize>) -> usize {
        sizes.into_iter().map(|size| size.next_multiple_of(REGION_ALIGN)).sum()
    }

    /// Maps zeroed memory and touches every page, so that no later step pays for a page fault and an overcommitted
    /// host fails here and not in the middle of training.
    pub fn allocate(bytes: usize) -> Result<Slab, AllocationError> {
        let bytes = bytes.max(REGION_ALIGN);
        let map =
            MmapOptions::new().len(bytes).map_anon().map_err(|source| AllocationError { bytes, source })?;
        if bytes >= HUGE_PAGE_BYTES {
            advise_huge_pages(&map);
        }
        if let Err(error) = map.advise(Advice::PopulateWrite) {
            // Before Linux 5.14 pages are touched by their first use instead.
            tracing::debug!(%error, bytes, "could not touch memory ahead of its use");
        }
        Ok(Slab { map })
    }

    /// Cuts the slab into exclusive regions, in order.
    ///
    /// # Panics
    /// If the sizes need more than the slab has.
    pub fn carve(self, sizes: &[usize]) -> Vec<Region> {
        assert!(
            Slab::bytes_for(sizes.iter().copied()) <= self.map.len(),
            "regions need more than the slab has"
        );
        let map = Arc::new(self.map);
        let mut start = 0;
        let mut regions = Vec::with_capacity(sizes.len());
        for &size in sizes {
            regions.push(Region::new(Arc::clone(&map), start, size));
            start += size.next_multiple_of(REGION_ALIGN);
        }
        regions
    }
}

fn advise_huge_pages(map: &MmapMut) {
    static WARN: Once = Once::new();
    let refused = map.advise(Advice::HugePage).err().map(|error| error.to_string());
    let never = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .is_ok_and(|modes| modes.contains("[never]"))
        .then(|| "transparent_hugepage is set to never".to_string());
    if let Some(reason) = refused.or(never) {
        WARN.call_once(|| {
            tracing::warn!(
                reason,
                "huge pages refused: direct I/O and updates will be slower. Remedy: \
                 echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
            );
        });
    }
}
