//! A slab: one mapping for all buffers of a kind, cut into exclusive regions. A job makes its slabs as it opens, and
//! its update threads touch them.

use std::{
    fs::{self, File},
    io,
    ops::Range,
    path::Path,
    sync::{Arc, Once, OnceLock},
};

use super::{
    Region, SharedFile,
    map::{HUGE_PAGE_BYTES, Map},
};

/// Regions start on cache lines, so that no two regions share a line.
const REGION_ALIGN: usize = 64;
const HUGE_PAGE_SETTING: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

#[derive(Debug, thiserror::Error)]
#[error("could not allocate {bytes} bytes: {source}. {}", remedy(source))]
pub struct AllocationError {
    pub bytes: usize,
    pub source: io::Error,
}

fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull => "Mount a larger tmpfs",
        _ => "Lower the memory budget or raise the container's memory limit",
    }
}

/// Threads that place memory near themselves, on their NUMA node.
pub trait Near {
    /// Runs `part` once for each thread, with its part of `0..count`, near the memory that it will use.
    fn shares(&self, count: usize, part: &(dyn Fn(Range<usize>) + Sync));
}

/// A mapping that has not been cut yet.
pub struct Slab {
    map: Map,
}

impl Slab {
    /// Returns the number of bytes that [`Slab::carve`] needs for regions of these sizes.
    pub fn bytes_for(sizes: impl IntoIterator<Item = usize>) -> usize {
        sizes.into_iter().map(|size| size.next_multiple_of(REGION_ALIGN)).sum()
    }

    pub fn allocate(bytes: usize) -> Result<Slab, AllocationError> {
        Slab::allocate_sparse(bytes, bytes)
    }

    /// Maps `bytes`, of which `used` will be touched at once. The kernel refuses the map if the host cannot have `used`
    /// bytes.
    pub fn allocate_sparse(bytes: usize, used: usize) -> Result<Slab, AllocationError> {
        let [bytes, used] = [bytes, used].map(|bytes| bytes.max(REGION_ALIGN));
        let mapped = match used < bytes {
            true => Map::anonymous(used).and_then(|_| Map::sparse(bytes)),
            false => Map::anonymous(bytes),
        };
        let map = mapped.map_err(|source| AllocationError { bytes: used, source })?;
        if bytes >= HUGE_PAGE_BYTES {
            advise_huge_pages(&map);
        }
        Ok(Slab { map })
    }

    /// Maps zeroed memory that other processes can be given to read, through the file that is returned.
    ///
    /// # Errors
    /// Where the kernel has no file seals against writers: before Linux 5.1.
    pub fn allocate_shared(bytes: usize) -> Result<(Slab, SharedFile), AllocationError> {
        let bytes = bytes.max(REGION_ALIGN);
        let (map, file) = SharedFile::sealed(bytes).map_err(|source| AllocationError { bytes, source })?;
        Ok((Slab { map }, file))
    }

    /// Maps the start of a file that outlives the process, and makes the file that long. The file's space is reserved
    /// where the slab is carved and touched. The file's content stays.
    ///
    /// The file must be this process's own: private to its user, in a folder that it has locked. No other process then
    /// truncates the file or writes to it.
    pub fn over_file(file: File, bytes: usize) -> Result<Slab, AllocationError> {
        let bytes = bytes.max(REGION_ALIGN);
        let failed = |source: io::Error| AllocationError { bytes, source };
        if file.metadata().map_err(failed)?.len() < bytes as u64 {
            file.set_len(bytes as u64).map_err(failed)?;
        }
        Ok(Slab { map: Map::kept(file, bytes).map_err(failed)? })
    }

    /// Cuts the slab into exclusive regions, in order, and touches all of them. So no later step pays for a page fault.
    /// An overcommitted host fails here, not in the middle of training.
    ///
    /// Each thread of `near` touches the part of a region whose blocks it will update. This also puts the part on the
    /// thread's NUMA node (no mbind: first touch decides). First touch costs most of an allocation. Memory that the
    /// kernel has at hand is touched at 24 GB/s, with one thread or two. Where the host of a virtual machine must first
    /// provide the memory, the rate was 4.3 to 5.8 GB/s.
    ///
    /// # Panics
    /// If the sizes need more than the slab has.
    pub fn carve(self, sizes: &[usize], near: &impl Near) -> Result<Vec<Region>, AllocationError> {
        self.carve_touching(sizes, |_| true, near)
    }

    /// Cuts the slab as [`Slab::carve`] does, and touches only the regions whose index `is_used`. Other regions take
    /// only address space until their first use.
    pub fn carve_touching(
        self,
        sizes: &[usize],
        is_used: impl Fn(usize) -> bool,
        near: &impl Near,
    ) -> Result<Vec<Region>, AllocationError> {
        let starts = self.starts(sizes);
        let used: Vec<usize> = (0..sizes.len()).filter(|&region| is_used(region)).collect();
        let regions = || used.iter().map(|&region| starts[region]..starts[region] + sizes[region]);
        let mut runs: Vec<Range<usize>> = Vec::new();
        for region in regions() {
            match runs.last_mut().filter(|run| run.end.next_multiple_of(REGION_ALIGN) == region.start) {
                Some(run) => run.end = region.end,
                None => runs.push(region),
            }
        }
        let bytes = regions().map(|region| region.len()).sum();
        let reserved = runs.iter().try_for_each(|run| self.map.reserve(run.clone()));
        let touched = reserved.and_then(|()| self.touch(&regions().collect::<Vec<_>>(), &runs, near));
        touched.map_err(|source| AllocationError { bytes, source })?;
        Ok(self.cut(starts, sizes))
    }

    /// Cuts the slab as [`Slab::carve`] does, with memory touched by the calling thread. Meant for buffers
    /// that devices fill, whichever thread reads them.
    pub fn carve_here(self, sizes: &[usize]) -> Vec<Region> {
        let starts = self.starts(sizes);
        if let Err(error) = self.map.populate(0..self.map.len()) {
            tracing::debug!(%error, "could not touch memory ahead of its use");
        }
        self.cut(starts, sizes)
    }

    fn starts(&self, sizes: &[usize]) -> Vec<usize> {
        let bytes = Slab::bytes_for(sizes.iter().copied());
        assert!(bytes <= self.map.len(), "regions need more than the slab has");
        let mut start = 0;
        let place = |&size: &usize| {
            let here = start;
            start += size.next_multiple_of(REGION_ALIGN);
            here
        };
        sizes.iter().map(place).collect()
    }

    fn cut(self, starts: Vec<usize>, sizes: &[usize]) -> Vec<Region> {
        let map = Arc::new(self.map);
        let regions = starts.into_iter().zip(sizes);
        regions.map(|(start, &size)| Region::new(Arc::clone(&map), start, size)).collect()
    }

    /// Touches regions. Regions without a gap between them form a run, and nothing outside of the runs is touched.
    fn touch(&self, regions: &[Range<usize>], runs: &[Range<usize>], near: &impl Near) -> io::Result<()> {
        let failed = OnceLock::new();
        // A part is a fraction of a region, so one division among threads serves regions of any size.
        const PARTS: usize = 1 << 20;
        near.shares(PARTS, &|share: Range<usize>| {
            for region in regions {
                let run = &runs[runs.partition_point(|run| run.end < region.end)];
                // A huge page belongs to the share in which it begins.
                let at = |part: usize| {
                    let begin = region.start + (region.len() as u128 * part as u128 / PARTS as u128) as usize;
                    if begin == run.start {
                        begin
                    } else {
                        begin.next_multiple_of(HUGE_PAGE_BYTES).min(run.end)
                    }
                };
                let (from, to) = (at(share.start), at(share.end));
                if from == to {
                    continue;
                }
                if let Err(error) = self.map.populate(from..to) {
                    // Only the first failure among the threads is returned.
                    let _ = failed.set(error);
                    return;
                }
            }
        });
        match failed.into_inner() {
            Some(error) if error.kind() == io::ErrorKind::InvalidInput => {
                // Before Linux 5.14 no call touches pages ahead, so their first use does.
                tracing::debug!(%error, "could not touch memory ahead of its use");
                Ok(())
            }
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

fn advise_huge_pages(map: &Map) {
    static WARN: Once = Once::new();
    let refused = map.prefer_huge_pages().err().map(|error| error.to_string());
    if let Some(reason) = refused.or_else(|| refusal(Path::new(HUGE_PAGE_SETTING))) {
        WARN.call_once(|| {
            tracing::warn!(
                reason,
                "huge pages refused: direct I/O and updates will be slower. Remedy: \
                 echo madvise > {HUGE_PAGE_SETTING}"
            );
        });
    }
}

/// Returns why the kernel refuses huge pages, by its setting: the mode in brackets is in force. A kernel without this
/// file refuses the advice itself, as the caller has already seen.
fn refusal(setting: &Path) -> Option<String> {
    let modes = fs::read_to_string(setting).ok()?;
    modes.contains("[never]").then(|| format!("{} is set to never", setting.display()))
}

#[cfg(all(test, not(loom)))]
pub(crate) mod tests {
    use super::*;

    /// Runs the given number of shares, all on the calling thread.
    pub(crate) struct Shares(pub(crate) usize);

    impl Near for Shares {
        fn shares(&self, count: usize, part: &(dyn Fn(Range<usize>) + Sync)) {
            (0..self.0).for_each(|share| part(count * share / self.0..count * (share + 1) / self.0));
        }
    }

    #[test]
    fn large_slabs_start_on_a_huge_page_and_are_resident_before_their_first_use() {
        let sizes = [3 * HUGE_PAGE_BYTES + 4096, 100, HUGE_PAGE_BYTES];
        for (threads, is_shared) in [(1, false), (3, false), (1, true), (3, true)] {
            let bytes = Slab::bytes_for(sizes);
            let slab = match is_shared {
                false => Slab::allocate(bytes).unwrap(),
                true => Slab::allocate_shared(bytes).unwrap().0,
            };
            let regions = slab.carve(&sizes, &Shares(threads)).unwrap();
            assert_eq!(regions[0].bytes().as_ptr().align_offset(HUGE_PAGE_BYTES), 0);
            let from = regions[0].bytes().as_ptr() as usize;
            assert!(bytes_of("Rss:", from) >= bytes, "{threads} {is_shared}");
        }
    }

    /// Returns the bytes that smaps counts under `name` for the mapping around an address.
    pub(crate) fn bytes_of(name: &str, address: usize) -> usize {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in maps.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            if let Some((from, to)) = range {
                let number = |text| usize::from_str_radix(text, 16);
                if let (Ok(from), Ok(to)) = (number(from), number(to)) {
                    inside = (from..to).contains(&address);
                }
            } else if let Some(rest) = line.strip_prefix(name).filter(|_| inside) {
                return rest.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024;
            }
        }
        0
    }
}
