//! Philox 4x32-10, a counter-based generator: equal counters and keys give equal bits, and nothing else counts.
//!
//! J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011). It is written
//! here, since it is one function and no crate that has it is kept up.

/// How many counters are taken at once, so that the compiler may use the host's vectors.
pub(super) const LANES: usize = 8;

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// What the generator makes of consecutive counters: `counter` and those after it. The other two words of a counter are
/// `stream`. The 128 bits of a counter are two numbers.
pub(super) fn draw(key: u64, stream: u64, counter: u64) -> [[u64; 2]; LANES] {
    let mut lanes = [[0; LANES]; 4];
    for lane in 0..LANES {
        let counter = counter + lane as u64;
        let words = [counter as u32, (counter >> 32) as u32, stream as u32, (stream >> 32) as u32];
        for (word, lanes) in words.into_iter().zip(&mut lanes) {
            lanes[lane] = word;
        }
    }
    rounds(&mut lanes, [key as u32, (key >> 32) as u32]);
    std::array::from_fn(|lane| {
        let word = |index: usize| u64::from(lanes[index][lane]);
        [word(0) | word(1) << 32, word(2) | word(3) << 32]
    })
}

fn rounds(lanes: &mut [[u32; LANES]; 4], mut key: [u32; 2]) {
    for _ in 0..ROUNDS {
        let [a, b, c, d] = lanes;
        for lane in 0..LANES {
            let left = u64::from(MULTIPLIERS[0]) * u64::from(a[lane]);
            let right = u64::from(MULTIPLIERS[1]) * u64::from(c[lane]);
            (a[lane], b[lane], c[lane], d[lane]) = (
                (right >> 32) as u32 ^ b[lane] ^ key[0],
                right as u32,
                (left >> 32) as u32 ^ d[lane] ^ key[1],
                left as u32,
            );
        }
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that the generator's authors publish with it: counter, key, result.
    const KNOWN: [([u32; 4], [u32; 2], [u32; 4]); 3] = [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ];

    #[test]
    fn the_authors_known_answers_come_out() {
        for (counter, key, expected) in KNOWN {
            let mut lanes = counter.map(|word| [word; LANES]);
            rounds(&mut lanes, key);
            assert_eq!(lanes, expected.map(|word| [word; LANES]));
        }
    }

    #[test]
    fn lanes_are_consecutive_counters() {
        let all = draw(3, 5, (1 << 32) - 4);
        for (lane, drawn) in (0u64..).zip(all) {
            assert_eq!(draw(3, 5, (1 << 32) - 4 + lane)[0], drawn);
        }
        let [first, second] = draw(0, 0, 0)[0];
        assert_eq!((first, second), (0xe169_c58d_6627_e8d5, 0x9b00_dbd8_bc57_ac4c));
    }
}
