//! Source and target of the moments in the loop of an update.

use super::super::low::{Codes, CodesOf, Halves, Key, QUANTIZATION_BLOCK, Tables};
use super::super::rules::Slots;
use super::super::{Code, State, isa::LANES};
use super::lanes::Lanes;

/// Both moments, 16 elements at a time. Its methods are safe under the conditions of [`Lanes`].
pub(super) trait Moments<V: Lanes>: Copy {
    /// Loads the first `count` moments of 16 elements from `i` on; the other moments have no meaning. `code` is the
    /// code of the first moment.
    unsafe fn load(self, i: usize, count: usize, code: Code) -> Slots<V>;
    /// Asks for the memory of moments that will be loaded, `ahead` of elements `i` and on.
    unsafe fn prefetch(self, i: usize, count: usize, ahead: usize);
    /// Stores the first `count` moments, which went through [`quiet`](Lanes::quiet).
    unsafe fn store(self, i: usize, count: usize, moments: Slots<V>);
}

/// Prefetches the memory `ahead` elements after element `i`, once for each cache line.
#[inline(always)]
pub(super) unsafe fn prefetch<V: Lanes, T>(from: *const T, i: usize, ahead: usize) {
    const LINE: usize = 64;
    if (i * size_of::<T>()).is_multiple_of(LINE) {
        V::prefetch(from.wrapping_add(i + ahead).cast());
    }
}

/// Moments that are f32 before and after.
#[derive(Clone, Copy)]
pub(super) struct Floats {
    first: *mut f32,
    second: *mut f32,
}

impl Floats {
    #[inline(always)]
    pub(super) fn new(state: &mut State) -> Floats {
        Floats { first: state.first.as_mut_ptr(), second: state.second.as_mut_ptr() }
    }
}

impl<V: Lanes> Moments<V> for Floats {
    #[inline(always)]
    unsafe fn prefetch(self, i: usize, count: usize, ahead: usize) {
        prefetch_slots::<V, _>([self.first, self.second], i, count, ahead);
    }

    #[inline(always)]
    unsafe fn load(self, i: usize, count: usize, _: Code) -> Slots<V> {
        let first = if count > 0 { V::load(self.first.add(i)) } else { V::splat(0.0) };
        [first, if count > 1 { V::load(self.second.add(i)) } else { first }]
    }

    #[inline(always)]
    unsafe fn store(self, i: usize, count: usize, [first, second]: Slots<V>) {
        if count > 0 {
            first.store(self.first.add(i));
        }
        if count > 1 {
            second.store(self.second.add(i));
        }
    }
}

/// Prefetches the memory of `count` slots, `ahead` elements after element `i`.
#[inline(always)]
unsafe fn prefetch_slots<V: Lanes, T>(slots: [*mut T; 2], i: usize, count: usize, ahead: usize) {
    for slot in slots.into_iter().take(count) {
        prefetch::<V, _>(slot.cast_const(), i, ahead);
    }
}

/// Moments in bf16. New moments are rounded stochastically.
#[derive(Clone, Copy)]
pub(super) struct Rounded<V: Lanes> {
    first: *mut u16,
    second: *mut u16,
    random: Hash<V>,
}

impl<V: Lanes> Rounded<V> {
    #[inline(always)]
    pub(super) unsafe fn new(halves: Halves) -> Self {
        Rounded {
            first: halves.first.as_mut_ptr(),
            second: halves.second.as_mut_ptr(),
            random: Hash::new(halves.key, halves.element),
        }
    }
}

impl<V: Lanes> Moments<V> for Rounded<V> {
    #[inline(always)]
    unsafe fn prefetch(self, i: usize, count: usize, ahead: usize) {
        prefetch_slots::<V, _>([self.first, self.second], i, count, ahead);
    }

    #[inline(always)]
    unsafe fn load(self, i: usize, count: usize, _: Code) -> Slots<V> {
        let first = if count > 0 { V::from_bf16(V::load_half(self.first.add(i))) } else { V::splat(0.0) };
        [first, if count > 1 { V::from_bf16(V::load_half(self.second.add(i))) } else { first }]
    }

    #[inline(always)]
    unsafe fn store(self, i: usize, count: usize, [first, second]: Slots<V>) {
        let random = self.random.at(i);
        if count > 0 {
            V::store_half(round::<V, false>(first, random), self.first.add(i));
        }
        if count > 1 {
            V::store_half(round::<V, true>(second, random), self.second.add(i));
        }
    }
}

/// Moments in 8-bit codes. New moments stay f32 here, since their codes depend on the block's largest new value. The
/// loop finds that value on the way.
#[derive(Clone, Copy)]
pub(super) struct Coded<V> {
    first: CodedMoment<V>,
    second: CodedMoment<V>,
    start: usize,
}

#[derive(Clone, Copy)]
struct CodedMoment<V> {
    codes: *const u8,
    floats: *mut f32,
    scales: *const f32,
    largest: *mut [u32; LANES],
    decoder: Decoder<V>,
}

impl<V: Lanes> Coded<V> {
    /// `code` is the first moment's.
    #[inline(always)]
    pub(super) unsafe fn new(codes: Codes, code: Code) -> Self {
        Coded {
            first: CodedMoment::new(codes.first, code),
            second: CodedMoment::new(codes.second, Code::Unsigned),
            start: codes.start,
        }
    }
}

impl<V: Lanes> Moments<V> for Coded<V> {
    #[inline(always)]
    unsafe fn prefetch(self, i: usize, count: usize, ahead: usize) {
        if count > 0 {
            prefetch::<V, _>(self.first.codes, i, ahead);
        }
        if count > 1 {
            prefetch::<V, _>(self.second.codes, i, ahead);
        }
    }

    #[inline(always)]
    unsafe fn load(self, i: usize, count: usize, code: Code) -> Slots<V> {
        let block = (self.start + i) / QUANTIZATION_BLOCK;
        let first = if count > 0 { self.first.load(i, block, code) } else { V::splat(0.0) };
        [first, if count > 1 { self.second.load(i, block, Code::Unsigned) } else { first }]
    }

    #[inline(always)]
    unsafe fn store(self, i: usize, count: usize, [first, second]: Slots<V>) {
        let block = (self.start + i) / QUANTIZATION_BLOCK;
        if count > 0 {
            self.first.store(i, block, first);
        }
        if count > 1 {
            self.second.store(i, block, second);
        }
    }
}

impl<V: Lanes> CodedMoment<V> {
    #[inline(always)]
    unsafe fn new(moment: CodesOf, code: Code) -> Self {
        CodedMoment {
            codes: moment.codes.as_ptr(),
            floats: moment.floats.as_mut_ptr(),
            scales: moment.scales.as_ptr(),
            largest: moment.largest.as_mut_ptr(),
            decoder: Decoder::new(code),
        }
    }

    #[inline(always)]
    unsafe fn load(self, i: usize, block: usize, code: Code) -> V {
        let (from, scale) = (self.codes.add(i), V::splat(*self.scales.add(block)));
        match code {
            Code::Signed => self.decoder.signed(from, scale),
            Code::Unsigned => self.decoder.unsigned(from, scale),
        }
    }

    #[inline(always)]
    unsafe fn store(self, i: usize, block: usize, moment: V) {
        moment.store(self.floats.add(i));
        let largest = self.largest.add(block).cast();
        V::store_words(larger(V::load_words(largest), moment), largest);
    }
}

/// The larger of a magnitude's bits and `moment`'s.
#[inline(always)]
pub(super) unsafe fn larger<V: Lanes>(largest: V::Words, moment: V) -> V::Words {
    V::max_words(largest, V::and_words(moment.to_words(), V::splat_words(!Tables::SIGN)))
}

/// [`Key::hash`] of consecutive elements.
#[derive(Clone, Copy)]
pub(super) struct Hash<V: Lanes> {
    first: u32,
    before: u32,
    lanes: V::Words,
    between: V::Words,
}

impl<V: Lanes> Hash<V> {
    /// The hash of elements `first` and on, a multiple of 16.
    #[inline(always)]
    pub(super) unsafe fn new(key: Key, first: u32) -> Self {
        const COUNT: [u32; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        let (lanes, between) = (V::load_words(COUNT.as_ptr()), V::splat_words(key.between));
        Hash { first, before: key.before, lanes, between }
    }

    /// The hash bits of 16 elements from `i` on, a multiple of 16. An element's index is `first + i`, with its lane
    /// in the last four bits.
    #[inline(always)]
    pub(super) unsafe fn at(self, i: usize) -> V::Words {
        let x = V::xor_words(self.lanes, V::splat_words((self.first + i as u32) ^ self.before));
        let x = V::xor_words(x, V::shift_right::<16>(x));
        let x = V::mul_words(x, V::splat_words(Key::FIRST_MULTIPLIER));
        let x = V::add_words(V::xor_words(x, V::shift_right::<15>(x)), self.between);
        let x = V::mul_words(x, V::splat_words(Key::SECOND_MULTIPLIER));
        V::xor_words(x, V::shift_right::<16>(x))
    }
}

/// Sixteen random bits in the lower half of each word.
#[inline(always)]
pub(super) unsafe fn sixteen<V: Lanes, const HIGH: bool>(random: V::Words) -> V::Words {
    if HIGH { V::shift_right::<16>(random) } else { V::and_words(random, V::splat_words(0xFFFF)) }
}

/// Rounds lanes to bf16, stochastically. Each NaN must be canonical, as [`quiet`](Lanes::quiet) makes it.
#[inline(always)]
pub(super) unsafe fn round<V: Lanes, const HIGH: bool>(lanes: V, random: V::Words) -> V::Half {
    V::upper_half(V::add_words(lanes.to_words(), sixteen::<V, HIGH>(random)))
}

/// Turns codes into values.
#[derive(Clone, Copy)]
pub(super) struct Decoder<V> {
    slope: V,
    offset: V,
}

impl<V: Lanes> Decoder<V> {
    #[inline(always)]
    pub(super) unsafe fn new(code: Code) -> Self {
        let tables = code.tables();
        Decoder { slope: V::load(tables.slope.as_ptr()), offset: V::load(tables.offset.as_ptr()) }
    }

    #[inline(always)]
    pub(super) unsafe fn unsigned(self, from: *const u8, scale: V) -> V {
        let f = V::convert(V::load_unsigned_bytes(from)).add(V::splat(0.5));
        let at = V::shift_right::<{ Tables::DECODE_SHIFT }>(f.to_words());
        f.mul(self.slope.lookup(at)).add(self.offset.lookup(at)).mul(scale)
    }

    #[inline(always)]
    pub(super) unsafe fn signed(self, from: *const u8, scale: V) -> V {
        let f = V::convert(V::load_signed_bytes(from)).add(V::splat(0.5));
        let at = V::shift_right::<{ Tables::DECODE_SHIFT }>(f.to_words());
        let sign = V::and_words(f.to_words(), V::splat_words(Tables::SIGN));
        let offset = V::from_words(V::xor_words(self.offset.lookup(at).to_words(), sign));
        f.mul(self.slope.lookup(at)).add(offset).mul(scale)
    }
}
