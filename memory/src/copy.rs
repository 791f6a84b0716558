//! Copies of bytes that another process may write during the copy, and long copies that go past the CPU's caches.

/// Unit of a volatile copy: the widest register that every CPU of the architecture has.
#[cfg(target_arch = "x86_64")]
type Word = std::arch::x86_64::__m128i;
#[cfg(target_arch = "aarch64")]
type Word = std::arch::aarch64::uint8x16_t;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
type Word = u64;

/// Number of words that one turn of the copy's loop moves.
const STRIDE: usize = 4;
/// Least length of a copy by the instruction `rep movsb`, whose start costs as much as copying 1 KiB.
#[cfg(target_arch = "x86_64")]
const AT_ONCE_BYTES: usize = 1024;
/// Least length of a copy past the caches. An ordinary store first reads its cache line, so memory moves three bytes
/// for each copied byte. Between tensors and shared memory a core copies 21 GB/s through its caches, and 31 GB/s past
/// them. Shorter copies go through the caches, since their bytes may be used from L2.
#[cfg(target_arch = "x86_64")]
const PAST_CACHES_BYTES: usize = 256 * 1024;
/// Unit of the stores past the caches.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Copies all of `source`, past the caches if it is long. Meant for bytes that are next used late, when caches would
/// have dropped them.
///
/// # Panics
/// If the lengths differ.
pub fn copy_past_caches(source: &[u8], target: &mut [u8]) {
    assert_eq!(target.len(), source.len(), "target against source");
    #[cfg(target_arch = "x86_64")]
    if target.len() >= PAST_CACHES_BYTES {
        // SAFETY: readable and as long as `target`.
        unsafe { stream(source.as_ptr(), target) };
        return;
    }
    target.copy_from_slice(source);
}

/// Copies bytes that another process may write during the copy. Each byte is loaded once.
///
/// x86-64 has one instruction for this copy, and memcpy uses it for copies of this length too. The compiler does not
/// see its loads, and so assumes nothing of the loaded bytes. A loop of loads and stores takes a fifth to a third
/// longer. Other CPUs, and short copies, use volatile loads of 16 bytes. Atomic loads have 8 bytes at most, and copy
/// two thirds as fast.
///
/// # Safety
/// `source` is readable for as many bytes as `target` has, and no reference of Rust's lets another thread write them.
pub(crate) unsafe fn copy_foreign(source: *const u8, target: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if target.len() >= PAST_CACHES_BYTES {
        // SAFETY: what the caller keeps.
        return unsafe { stream(source, target) };
    } else if target.len() >= AT_ONCE_BYTES {
        // SAFETY: the instruction reads and writes as many bytes as both sides have, and changes the three registers.
        // `target` is borrowed exclusively. The calling convention keeps the direction flag clear.
        unsafe {
            std::arch::asm!(
                "rep movsb",
                inout("rcx") target.len() => _,
                inout("rdi") target.as_mut_ptr() => _,
                inout("rsi") source => _,
                options(nostack, preserves_flags)
            );
        }
        return;
    }
    // SAFETY: what the caller keeps.
    unsafe { copy_volatile(source, target) }
}

/// Copies whole lines of the target past the caches. The compiler does not see these loads either. Stores past the
/// caches may become visible late, so the loop ends with a fence. A thread that learns of the copy then sees all of it.
///
/// # Safety
/// The caller fulfils the conditions of [`copy_foreign`].
#[cfg(target_arch = "x86_64")]
unsafe fn stream(source: *const u8, target: &mut [u8]) {
    let head = target.as_ptr().align_offset(LINE).min(target.len());
    let (head, rest) = target.split_at_mut(head);
    let (lines, tail) = rest.split_at_mut(rest.len() - rest.len() % LINE);
    // SAFETY: `source` reaches as far as the three parts of the target together.
    let (to_lines, to_tail) = unsafe { (source.add(head.len()), source.add(head.len() + lines.len())) };
    // SAFETY: what the caller keeps, for a part.
    unsafe { copy_volatile(source, head) };
    if !lines.is_empty() {
        // SAFETY: the loop reads as many bytes as `lines` has, and writes `lines`, which are borrowed exclusively. The
        // lines are whole, and aligned as the stores need. Every changed register is named. SSE2 is part of x86-64.
        unsafe {
            std::arch::asm!(
                "2:",
                "movups {a}, [{from}]",
                "movups {b}, [{from} + 16]",
                "movups {c}, [{from} + 32]",
                "movups {d}, [{from} + 48]",
                "movntps [{to}], {a}",
                "movntps [{to} + 16], {b}",
                "movntps [{to} + 32], {c}",
                "movntps [{to} + 48], {d}",
                "add {from}, 64",
                "add {to}, 64",
                "dec {left}",
                "jnz 2b",
                "sfence",
                from = inout(reg) to_lines => _,
                to = inout(reg) lines.as_mut_ptr() => _,
                left = inout(reg) lines.len() / LINE => _,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack)
            );
        }
    }
    // SAFETY: as for the head.
    unsafe { copy_volatile(to_tail, tail) };
}

/// Copies by volatile loads, of 64 bytes in a turn.
///
/// # Safety
/// The caller fulfils the conditions of [`copy_foreign`].
unsafe fn copy_volatile(source: *const u8, target: &mut [u8]) {
    let (count, to) = (target.len(), target.as_mut_ptr());
    let mut at = source.align_offset(align_of::<Word>()).min(count);
    // SAFETY: `at` never passes `count`, to which both sides reach.
    unsafe { copy_bytes(source, to, 0, at) };
    while count - at >= STRIDE * size_of::<Word>() {
        // SAFETY: as above, and a multiple of words from where they are aligned.
        unsafe {
            let (from, to) = (source.add(at).cast::<Word>(), to.add(at).cast::<Word>());
            // All loads come first. With stores between the loads, the CPU waits where source and target are whole
            // pages apart.
            let words: [Word; STRIDE] = std::array::from_fn(|index| from.add(index).read_volatile());
            to.cast::<[Word; STRIDE]>().write_unaligned(words);
        }
        at += STRIDE * size_of::<Word>();
    }
    // SAFETY: as above.
    unsafe { copy_bytes(source, to, at, count) };
}

/// # Safety
/// The caller fulfils the conditions of [`copy_foreign`], from byte `at` to `end`.
unsafe fn copy_bytes(source: *const u8, target: *mut u8, at: usize, end: usize) {
    for index in at..end {
        // SAFETY: inside both.
        unsafe { target.add(index).write(source.add(index).read_volatile()) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Both copies, with lengths around each threshold, from any offset in a line to any other.
    #[test]
    fn copies_are_whole_wherever_they_begin_and_end() {
        let bytes: Vec<u8> = (0..600_000u32).map(|index| ((index * 31) >> 3) as u8).collect();
        let lengths = [0, 1, 63, 64, 1023, 1024, 1025, 262_143, 262_144, 262_145, 262_208, 500_001];
        let mut target = vec![0; 600_000];
        for len in lengths {
            for (start, to) in [(0, 0), (0, 1), (1, 0), (5, 37), (16, 48), (63, 64), (64, 1), (4000, 8)] {
                let source = &bytes[start..start + len];
                for is_foreign in [false, true] {
                    target[..to + len + 80].fill(0xEE);
                    let place = &mut target[to..to + len];
                    match is_foreign {
                        false => copy_past_caches(source, place),
                        // SAFETY: as long as the target, and no thread writes it.
                        true => unsafe { copy_foreign(source.as_ptr(), place) },
                    }
                    let (before, after) = (&target[..to], &target[to + len..to + len + 80]);
                    assert!(target[to..to + len] == *source, "{len} from {start} to {to}");
                    assert!(
                        before.iter().chain(after).all(|&byte| byte == 0xEE),
                        "{len} from {start} to {to}"
                    );
                }
            }
        }
    }
}
