//! Passes of an instruction set for an update of low-precision state, and the parts of a chunk that they get.

use super::super::isa::LANES;
use super::super::{Gradient, ImageMut, Scalars, State};
use super::random::{Half, Key};
use super::{Code, QUANTIZATION_BLOCK};

const BLOCK: usize = QUANTIZATION_BLOCK;
pub(super) const BLOCKS: usize = CHUNK / BLOCK;

/// Number of elements decoded at a time. Branches on rule and formats are taken once for four blocks, and the arrays of
/// a chunk take a quarter of L1.
pub(in super::super) const CHUNK: usize = 4 * BLOCK;

/// Passes of an instruction set over one block (`update`: over up to a chunk). All slices of a call have one
/// length.
pub(in super::super) trait Passes: Copy {
    /// Runs [`update`](super::super::update); None makes no image.
    fn update(self, s: &Scalars, gradient: Gradient, state: State, image: Option<ImageMut>);
    /// Runs [`update`](super::super::update), with moments that are brought to f32 in the same loop. May be
    /// called only where the instruction set [`fuses`](Passes::fuses).
    fn update_low_moments(
        self,
        s: &Scalars,
        gradient: Gradient,
        master: &mut [f32],
        moments: InLoop,
        image: Option<ImageMut>,
    );
    /// Returns true if the instruction set has fused loops, and `image` is aligned for them.
    fn fuses(self, image: &ImageMut) -> bool;
    fn widen_bf16(self, from: &[u16], to: &mut [f32]);
    fn decode(self, code: Code, from: &[u8], scale: f32, to: &mut [f32]);
    /// The random bits of elements `first` and on.
    fn random(self, key: Key, first: u32, to: &mut [u32; BLOCK]);
    fn round_bf16(self, from: &[f32], random: &[u32; BLOCK], half: Half, to: &mut [u16]);
    /// Encodes a block and returns its scale.
    fn encode(self, code: Code, from: &[f32], random: &[u32; BLOCK], half: Half, to: &mut [u8]) -> f32;
    /// Encodes both moments of a block that begins at element `first`. `code` is the code of the first moment. Returns
    /// the scales.
    fn encode_both(self, code: Code, block: Encoding, key: Key, first: u32) -> [f32; 2];
    /// Rounds new master weights into `master`, from element `first` on. With `image`, also makes the image of the
    /// result.
    fn round_master(self, new: &[f32], key: Key, first: u32, master: &mut [u16], image: Option<ImageMut>);
    fn finish(self);
}

/// Moments that the loop of a rule reads in their own format.
pub(in super::super) enum InLoop<'a> {
    Halves(Halves<'a>),
    Codes(Codes<'a>),
}

/// bf16 moments, rounded with the bits of `element` and on.
pub(in super::super) struct Halves<'a> {
    pub(in super::super) first: &'a mut [u16],
    pub(in super::super) second: &'a mut [u16],
    pub(in super::super) key: Key,
    pub(in super::super) element: u32,
}

/// Bits of a block's largest magnitudes, by lane. Lane `i` has the elements `i`, `i + 16` and so on.
pub(in super::super) type Largest = [u32; LANES];

/// Both moments of a part of a chunk.
pub(in super::super) struct Codes<'a> {
    pub(in super::super) first: CodesOf<'a>,
    pub(in super::super) second: CodesOf<'a>,
    /// The first element of the part in its chunk.
    pub(in super::super) start: usize,
}

/// Codes of a moment. The second moment's slices are empty where the rule has none.
pub(in super::super) struct CodesOf<'a> {
    /// The part's codes.
    pub(in super::super) codes: &'a [u8],
    /// Target of the part's new values.
    pub(in super::super) floats: &'a mut [f32],
    /// The scales of the chunk's blocks; each is finite or NaN.
    pub(in super::super) scales: &'a [f32; BLOCKS],
    /// The largest magnitudes of the chunk's blocks, raised by the new values of the part.
    pub(in super::super) largest: &'a mut [Largest; BLOCKS],
}

/// New values, largest magnitude and target of each of a block's two moments.
pub(in super::super) struct Encoding<'a> {
    pub(in super::super) from: [&'a [f32]; 2],
    pub(in super::super) largest: [&'a Largest; 2],
    pub(in super::super) to: [&'a mut [u8]; 2],
}
