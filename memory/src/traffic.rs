//! Memory traffic of an update without its arithmetic: the least that an update can cost. `longshore bench update`
//! compares updates with it. Stores past the caches have no safe form, so the module is in this crate.

use std::hint::black_box;

/// Elements of every array that are moved at a time. In an array with n bytes an element, a group is n whole cache
/// lines. Remaining bytes of an array, such as the scales of 8-bit moments, follow at the end.
const GROUP: usize = 64;
const LINE: usize = 64;

/// The arrays of one block.
pub struct Traffic<'a> {
    /// Read once: the gradient.
    pub read: &'a [u8],
    /// Read and written back unchanged: master weights and state. Unused arrays are empty.
    pub update: [&'a mut [u8]; 3],
    /// Written once, with any bytes: the image. The bytes go past the caches, as kernels write images.
    pub write: &'a mut [u8],
}

impl Traffic<'_> {
    /// Returns the number of bytes that go through memory.
    pub fn bytes(&self) -> usize {
        let update: usize = self.update.iter().map(|array| array.len()).sum();
        self.read.len() + 2 * update + self.write.len()
    }

    /// Moves the bytes of `elements` elements with the widest registers of this CPU.
    ///
    /// # Panics
    /// If `elements` is not a multiple of 64, or if an array is not whole cache lines. Panics also if the
    /// read or the written array is not a whole number of bytes an element. The written one must start on a
    /// cache line.
    pub fn run(self, elements: usize) {
        assert!(elements.is_multiple_of(GROUP), "{elements} elements are not a multiple of {GROUP}");
        assert_eq!(self.write.as_ptr().align_offset(LINE), 0, "the written array starts inside a cache line");
        let lines = |bytes: usize| {
            assert!(bytes.is_multiple_of(elements.max(1)), "{bytes} bytes for {elements} elements");
            bytes / elements.max(1)
        };
        let [master, first, second] = self.update;
        let arrays = Arrays {
            groups: elements / GROUP,
            read: (self.read.as_ptr(), lines(self.read.len())),
            update: [master, first, second].map(|array| {
                assert!(array.len().is_multiple_of(LINE), "{} bytes of state", array.len());
                let lines = array.len() / elements.max(1);
                (array.as_mut_ptr(), lines, array.len() / LINE - elements / GROUP * lines)
            }),
            write: (self.write.as_mut_ptr(), lines(self.write.len())),
        };
        #[cfg(target_arch = "x86_64")]
        {
            // SAFETY: the CPU has the instructions. The arrays are borrowed for this call. The lines of all groups
            // are inside them, and the written array is aligned.
            unsafe {
                if is_x86_feature_detected!("avx512f") {
                    return avx512(&arrays);
                }
                if is_x86_feature_detected!("avx2") {
                    return avx2(&arrays);
                }
            }
        }
        // SAFETY: as above.
        unsafe { plain(&arrays) }
    }
}

/// Each array with its number of lines in a group. A group of 64 elements of n bytes is n lines of 64 bytes. Arrays
/// that are updated also have their lines after the last group.
struct Arrays {
    groups: usize,
    read: (*const u8, usize),
    update: [(*mut u8, usize, usize); 3],
    write: (*mut u8, usize),
}

/// The loop over groups and lines, for one kind of register. Bytes are written back xored with a zero that the compiler
/// does not know. Otherwise the compiler would leave out stores of unchanged bytes.
macro_rules! loops {
    ($arrays:ident, $vector:ty, $zero:expr, $ones:expr, $load:path, $xor:path, $store:path, $stream:path) => {{
        let zero: $vector = black_box($zero);
        // The written bytes are not zero, since Zen 5 stores lines of zeros faster. With zeros the loop took 12 % less
        // time.
        let mut mixed: $vector = black_box($ones);
        for group in 0..$arrays.groups {
            let line = |(start, lines): (*mut u8, usize), index: usize, part: usize| {
                start.add((group * lines + index) * LINE).cast::<$vector>().add(part)
            };
            let parts = LINE / size_of::<$vector>();
            let read = ($arrays.read.0.cast_mut(), $arrays.read.1);
            for index in 0..read.1 {
                for part in 0..parts {
                    mixed = $xor(mixed, $load(line(read, index, part).cast_const()));
                }
            }
            for (start, lines, _) in $arrays.update {
                for index in 0..lines {
                    for part in 0..parts {
                        let at = line((start, lines), index, part);
                        $store(at, $xor(zero, $load(at.cast_const())));
                    }
                }
            }
            for index in 0..$arrays.write.1 {
                for part in 0..parts {
                    $stream(line($arrays.write, index, part), mixed);
                }
            }
        }
        for (start, lines, rest) in $arrays.update {
            let rest_at = start.add($arrays.groups * lines * LINE).cast::<$vector>();
            for part in 0..rest * (LINE / size_of::<$vector>()) {
                let at = rest_at.add(part);
                $store(at, $xor(zero, $load(at.cast_const())));
            }
        }
        black_box(mixed);
    }};
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[allow(unsafe_op_in_unsafe_fn)]
unsafe fn avx512(arrays: &Arrays) {
    use std::arch::x86_64::*;
    loops!(
        arrays,
        __m512i,
        _mm512_setzero_si512(),
        _mm512_set1_epi8(1),
        _mm512_loadu_si512,
        _mm512_xor_si512,
        _mm512_storeu_si512,
        _mm512_stream_si512
    );
    _mm_sfence();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[allow(unsafe_op_in_unsafe_fn)]
unsafe fn avx2(arrays: &Arrays) {
    use std::arch::x86_64::*;
    loops!(
        arrays,
        __m256i,
        _mm256_setzero_si256(),
        _mm256_set1_epi8(1),
        _mm256_loadu_si256,
        _mm256_xor_si256,
        _mm256_storeu_si256,
        _mm256_stream_si256
    );
    _mm_sfence();
}

#[allow(unsafe_op_in_unsafe_fn)]
unsafe fn plain(arrays: &Arrays) {
    fn xor(a: u128, b: u128) -> u128 {
        a ^ b
    }
    unsafe fn load(at: *const u128) -> u128 {
        at.read_unaligned()
    }
    unsafe fn store(at: *mut u128, value: u128) {
        at.write_unaligned(value);
    }
    loops!(arrays, u128, 0, 1, load, xor, store, store);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Slab, slab::tests::Shares};

    /// The arrays have unlike widths. Updated arrays keep their bits, and the written array is written whole.
    #[test]
    fn moves_everything_and_changes_no_state() {
        let elements = 4 * GROUP;
        // The fourth array is laid out as 8-bit moments are, with a line of scales.
        let sizes = [2 * elements, 4 * elements, 4 * elements, elements + LINE, 2 * elements];
        let slab = Slab::allocate(Slab::bytes_for(sizes)).unwrap();
        let mut regions = slab.carve(&sizes, &Shares(1)).unwrap();
        for (index, region) in regions.iter_mut().enumerate() {
            let bytes = region.bytes_mut().iter_mut().enumerate();
            bytes.for_each(|(at, byte)| *byte = (at * 7 + index) as u8 | 1);
        }
        let before: Vec<Vec<u8>> = regions.iter().map(|region| region.bytes().to_vec()).collect();
        let [read, master, first, second, write] = &mut regions[..] else { unreachable!() };
        // Equal lines cancel out when they are mixed, and yet no line may be written as zeros.
        read.bytes_mut().fill(3);
        write.bytes_mut().fill(9);
        let update = [master.bytes_mut(), first.bytes_mut(), second.bytes_mut()];
        let traffic = Traffic { read: read.bytes(), update, write: write.bytes_mut() };
        assert_eq!(traffic.bytes(), elements * (2 + 2 * 9 + 2) + 2 * LINE);
        traffic.run(elements);
        assert!((1..4).all(|index| regions[index].bytes() == before[index]));
        assert!(regions[4].bytes().chunks(LINE).all(|line| line.iter().any(|&byte| byte != 0 && byte != 9)));
    }
}
