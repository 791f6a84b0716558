//! Elements to compute with. This process owns the elements, or another process may write them during a read.

use std::{fmt, marker::PhantomData, ops::Range};

use super::copy::{copy_foreign, copy_past_caches};

/// A kind of number for which every pattern of bits is a value, without padding.
pub trait Element: bytemuck::Pod {}

impl Element for u8 {}
impl Element for u16 {}
impl Element for f32 {}

/// Size of the pieces that are copied before they are used: half of the smallest L1 cache.
const PIECE_BYTES: usize = 16 * 1024;

/// Elements in a row that can be read while the source lives.
///
/// Elements that another process may write have no reference, and lie in no allocation of Rust's. Each read of an
/// element is volatile, and returns the bytes of that moment: two reads may differ. So these elements are numbers to
/// compute with. An index, a length or a check must use a copy.
///
/// Vector kernels load from [`Source::as_ptr`] with the intrinsics of their instruction set. Such a kernel loads each
/// element once for each use, and computes nothing but sums and products from it.
pub struct Source<'a, T> {
    start: *const T,
    len: usize,
    /// True if the elements stay unchanged while the source lives, so that they may be borrowed.
    owned: bool,
    from: PhantomData<&'a [T]>,
}

// SAFETY: a source only reads. Made of a slice it is as good as the slice, which is `Send` if `T` is `Sync`. Elements
// of another process are mapped for all threads of this one.
unsafe impl<T: Sync> Send for Source<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Source<'_, T> {}

impl<T> Clone for Source<'_, T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Source<'_, T> {}

impl<T> fmt::Debug for Source<'_, T> {
    /// Shows the elements' number and address only, since another process may write the elements.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements at {:p}", self.len, self.start)
    }
}

impl<'a, T: Element> From<&'a [T]> for Source<'a, T> {
    #[inline(always)]
    fn from(elements: &'a [T]) -> Source<'a, T> {
        Source { start: elements.as_ptr(), len: elements.len(), owned: true, from: PhantomData }
    }
}

impl<'a> Source<'a, u8> {
    /// Bytes that another process may write.
    ///
    /// # Safety
    /// For as long as `'a` the bytes are mapped and readable. Nothing of this process writes them, and no
    /// reference to them exists.
    pub(crate) unsafe fn of_another_process(start: *const u8, len: usize) -> Source<'a, u8> {
        Source { start, len, owned: false, from: PhantomData }
    }

    /// The same bytes as elements.
    ///
    /// # Panics
    /// If they are not whole aligned elements.
    pub fn cast<T: Element>(self) -> Source<'a, T> {
        let start = self.start.cast::<T>();
        assert!(
            start.is_aligned() && self.len.is_multiple_of(size_of::<T>()),
            "{self:?} are no whole elements"
        );
        Source { start, len: self.len / size_of::<T>(), owned: self.owned, from: PhantomData }
    }
}

impl<'a, T> Source<'a, T> {
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address, for vector loads and to see how the elements are aligned.
    #[inline(always)]
    pub fn as_ptr(&self) -> *const T {
        self.start
    }

    /// # Panics
    /// If the range is not inside.
    #[inline(always)]
    pub fn slice(&self, range: Range<usize>) -> Source<'a, T> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        // SAFETY: inside, as just asserted.
        let start = unsafe { self.start.add(range.start) };
        Source { start, len: range.end - range.start, ..*self }
    }
}

impl<'a, T: Element> Source<'a, T> {
    /// Copies all elements. A long copy goes past the caches.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_to(&self, target: &mut [T]) {
        assert_eq!(target.len(), self.len, "target against source");
        if let Some(elements) = self.owned_elements() {
            copy_past_caches(bytemuck::cast_slice(elements), bytemuck::cast_slice_mut(target));
        } else {
            // SAFETY: readable bytes of `len` elements; `target` is borrowed exclusively and as long.
            unsafe { copy_foreign(self.start.cast(), bytemuck::cast_slice_mut(target)) }
        }
    }

    /// Shows all elements in order: `visit(index of the first, elements)`. Elements that another process may
    /// write are shown as copies, of 16 KiB each.
    #[inline]
    pub fn pieces(&self, mut visit: impl FnMut(usize, &[T])) {
        if let Some(elements) = self.owned_elements() {
            visit(0, elements);
            return;
        }
        let mut piece = [0u64; PIECE_BYTES / size_of::<u64>()];
        let piece: &mut [T] = bytemuck::cast_slice_mut(&mut piece);
        for start in (0..self.len).step_by(piece.len()) {
            let end = self.len.min(start + piece.len());
            let piece = &mut piece[..end - start];
            self.slice(start..end).copy_to(piece);
            visit(start, piece);
        }
    }

    fn owned_elements(&self) -> Option<&'a [T]> {
        // SAFETY: an owned source was made of this slice, whose borrow lasts as long as `'a`.
        self.owned.then(|| unsafe { std::slice::from_raw_parts(self.start, self.len) })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_all_elements_in_order() {
        let elements: Vec<u16> = (0..20_011).collect();
        let bytes: &[u8] = bytemuck::cast_slice(&elements);
        // SAFETY: the bytes live as long as this test, and stay unchanged.
        let foreign = unsafe { Source::of_another_process(bytes.as_ptr(), bytes.len()) }.cast::<u16>();
        for source in [foreign, Source::from(&elements[..])] {
            let mut seen = Vec::new();
            source.slice(11..20_011).pieces(|at, piece| {
                assert_eq!(at, seen.len());
                seen.extend_from_slice(piece);
            });
            assert_eq!(seen, elements[11..]);
        }
    }

    #[test]
    #[should_panic(expected = "no whole elements")]
    fn elements_are_aligned() {
        let elements = [0u16; 4];
        let bytes: &[u8] = bytemuck::cast_slice(&elements);
        Source::from(&bytes[1..3]).cast::<u16>();
    }
}
