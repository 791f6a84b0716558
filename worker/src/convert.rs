//! Converts f32 to and from the wire's element types, little-endian. The functions take slices and branch on the
//! type once per call.

use half::{f16, slice::HalfFloatSliceExt};
use longshore_memory::float::Standard;
use longshore_proto::Dtype;

/// Elements per tile on the stack: 2 KiB of f16 stay in the L1 cache.
const TILE: usize = 1024;

/// Converts `source` into `target`, rounding to nearest even. f16 overflows to infinity. `target` holds exactly as
/// many elements.
pub fn from_f32(dtype: Dtype, source: &[f32], target: &mut [u8]) {
    assert_eq!(source.len() as u64 * dtype.bytes(), target.len() as u64, "both sides hold the same elements");
    match dtype {
        Dtype::F32 => {
            for (bytes, value) in target.as_chunks_mut::<4>().0.iter_mut().zip(source) {
                *bytes = value.to_le_bytes();
            }
        }
        Dtype::Bf16 => {
            for (bytes, value) in target.as_chunks_mut::<2>().0.iter_mut().zip(source) {
                *bytes = bf16_bits(*value).to_le_bytes();
            }
        }
        Dtype::F16 => f16_from_f32(source, target),
    }
}

/// Converts `source` into `target` without loss.
pub fn to_f32(dtype: Dtype, source: &[u8], target: &mut [f32]) {
    assert_eq!(target.len() as u64 * dtype.bytes(), source.len() as u64, "both sides hold the same elements");
    match dtype {
        Dtype::F32 => {
            for (value, bytes) in target.iter_mut().zip(source.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        Dtype::Bf16 => {
            for (value, bytes) in target.iter_mut().zip(source.as_chunks::<2>().0) {
                *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
            }
        }
        Dtype::F16 => f16_to_f32(source, target),
    }
}

/// Rounds to bf16 without a branch, so that the loop above is vectorized. `half`'s own function has a branch.
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16) as u16;
    // Rounding would turn some NaNs into infinity: keep the high bits, and set the quiet bit.
    let nan = (bits >> 16) as u16 | 0x0040;
    if bits & 0x7FFF_FFFF > 0x7F80_0000 { nan } else { rounded }
}

/// Converts by tiles: `half` uses the CPU's conversion instructions for slices.
fn f16_from_f32(source: &[f32], target: &mut [u8]) {
    let _standard = Standard::enter();
    let mut tile = [f16::ZERO; TILE];
    for (source, target) in source.chunks(TILE).zip(target.chunks_mut(2 * TILE)) {
        let tile = &mut tile[..source.len()];
        tile.convert_from_f32_slice(source);
        for (bytes, value) in target.as_chunks_mut::<2>().0.iter_mut().zip(tile) {
            *bytes = value.to_le_bytes();
        }
    }
}

fn f16_to_f32(source: &[u8], target: &mut [f32]) {
    let _standard = Standard::enter();
    let mut tile = [f16::ZERO; TILE];
    for (source, target) in source.chunks(2 * TILE).zip(target.chunks_mut(TILE)) {
        let tile = &mut tile[..target.len()];
        for (value, bytes) in tile.iter_mut().zip(source.as_chunks::<2>().0) {
            *value = f16::from_le_bytes(*bytes);
        }
        tile.convert_to_f32_slice(target);
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn sixteen_bit_types_agree_with_half_on_every_upper_half_and_rounding_case() {
        let lows = [0u32, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
        let values: Vec<f32> =
            (0..=0xFFFFu32).flat_map(|high| lows.map(|low| f32::from_bits(high << 16 | low))).collect();
        let mut wire = vec![0; values.len() * 2];
        from_f32(Dtype::Bf16, &values, &mut wire);
        for (value, bytes) in values.iter().zip(wire.as_chunks::<2>().0) {
            assert_eq!(
                u16::from_le_bytes(*bytes),
                bf16::from_f32(*value).to_bits(),
                "{:08x}",
                value.to_bits()
            );
        }
        from_f32(Dtype::F16, &values, &mut wire);
        for (value, bytes) in values.iter().zip(wire.as_chunks::<2>().0) {
            let found = f16::from_le_bytes(*bytes);
            let right = f16::from_f32(*value);
            assert!(found.to_bits() == right.to_bits() || found.is_nan() && right.is_nan(), "{value}");
        }
        assert_eq!(f16::from_f32(65520.0), f16::INFINITY);
    }

    #[test]
    fn values_survive_a_round_trip() {
        let values: Vec<f32> = (0..5000).map(|index| (index as f32 - 2500.0) / 8.0).collect();
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let mut wire = vec![0; values.len() * dtype.bytes() as usize];
            let mut back = vec![0.0; values.len()];
            from_f32(dtype, &values, &mut wire);
            to_f32(dtype, &wire, &mut back);
            let exact =
                |value: f32| if dtype == Dtype::Bf16 { bf16::from_f32(value).to_f32() } else { value };
            let same = values.iter().zip(&back).all(|(&value, &back)| match dtype {
                Dtype::F16 => (value - back).abs() <= value.abs() / 2048.0,
                _ => exact(value) == back,
            });
            assert!(same, "{dtype}");
        }
    }
}
