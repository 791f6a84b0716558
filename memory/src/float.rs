//! The floating-point mode of a thread. `torch.set_flush_denormal`, `fesetround` and libraries linked with -ffast-math
//! change the mode, and new threads inherit it. Arithmetic whose bits are promised runs in the [`Standard`] mode:
//! denormals kept, rounding to nearest, no traps.

use std::{hint::black_box, marker::PhantomData};

/// Puts the calling thread into the standard mode while the value lives, then restores the thread's earlier mode.
/// Numbers computed in between depend on no setting of the host process.
pub struct Standard {
    before: Option<Mode>,
    /// Keeps the value on its thread, since the mode belongs to that thread.
    _thread: PhantomData<*const ()>,
}

impl Standard {
    #[inline]
    pub fn enter() -> Standard {
        let found = read();
        let before = (found & CONTROL != STANDARD).then(|| {
            write(STANDARD);
            found
        });
        Standard { before, _thread: PhantomData }
    }
}

impl Drop for Standard {
    #[inline]
    fn drop(&mut self) {
        if let Some(before) = self.before {
            write(before);
        }
    }
}

/// Calls `act` in the standard mode. Compilers know nothing of the mode, and may move short arithmetic past a
/// [`Standard`]. The black boxes keep the arithmetic inside.
#[inline]
pub fn standard<T>(act: impl FnOnce() -> T) -> T {
    let _standard = Standard::enter();
    black_box(black_box(act)())
}

/// Puts the calling thread into the standard mode for its life. Meant for threads that belong to Longshore.
pub fn standard_thread() {
    std::mem::forget(Standard::enter());
}

/// The mode of hosts that flush denormals and round down, for tests. Dropping the [`Standard`] restores the earlier
/// mode.
#[doc(hidden)]
pub fn foreign_for_tests() -> Standard {
    let before = Some(read());
    write(FOREIGN);
    Standard { before, _thread: PhantomData }
}

#[cfg(target_arch = "x86_64")]
use x86::*;
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;

    pub(super) type Mode = u32;
    /// All traps masked.
    pub(super) const STANDARD: Mode = 0x1F80;
    /// Mask of all fields except the sticky flags of exceptions.
    pub(super) const CONTROL: Mode = 0xFFC0;
    /// Flush to zero, denormals are zero, rounding down.
    pub(super) const FOREIGN: Mode = STANDARD | 0x8000 | 0x0040 | 0x2000;

    #[inline]
    pub(super) fn read() -> Mode {
        let mut mode: Mode = 0;
        // SAFETY: the instruction writes the four bytes of `mode` alone.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut mode, options(nostack, preserves_flags)) };
        mode
    }

    #[inline]
    pub(super) fn write(mode: Mode) {
        // SAFETY: `mode` is a constant of this module or was read from the register, so no reserved bit is set. The
        // clobbered memory keeps loads and stores of arithmetic on their side.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "aarch64")]
use aarch64::*;
#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use std::arch::asm;

    pub(super) type Mode = u64;
    pub(super) const STANDARD: Mode = 0;
    /// Mask of FPCR's fields that change results or trap. From bit 0: FIZ, AH, NEP, traps, FZ16, rounding, FZ, default
    /// NaN, alternative half precision.
    pub(super) const CONTROL: Mode = 0x07CF_9F07;
    /// Flush to zero, rounding down.
    pub(super) const FOREIGN: Mode = (1 << 24) | (0b10 << 22);

    #[inline]
    pub(super) fn read() -> Mode {
        let mode: Mode;
        // SAFETY: reads a register that every thread may read.
        unsafe { asm!("mrs {}, fpcr", out(reg) mode, options(nostack, preserves_flags)) };
        mode
    }

    #[inline]
    pub(super) fn write(mode: Mode) {
        // SAFETY: `mode` is a constant of this module or was read from the register. The clobbered memory keeps loads
        // and stores of arithmetic on their side.
        unsafe { asm!("msr fpcr, {}", in(reg) mode, options(nostack, preserves_flags)) };
    }
}

/// Targets whose mode is not known compute in the mode that they find.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
use other::*;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod other {
    pub(super) type Mode = u32;
    pub(super) const STANDARD: Mode = 0;
    pub(super) const CONTROL: Mode = 0;
    pub(super) const FOREIGN: Mode = 0;

    pub(super) fn read() -> Mode {
        STANDARD
    }

    pub(super) fn write(_: Mode) {}
}

#[cfg(all(test, not(loom), any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests {
    use std::hint::black_box;

    use super::*;

    fn halved() -> f32 {
        black_box(f32::MIN_POSITIVE) / black_box(2.0)
    }

    #[test]
    fn the_standard_mode_keeps_denormals_and_gives_the_mode_back() {
        let foreign = foreign_for_tests();
        assert_eq!(halved(), 0.0, "this host's mode was not changed");
        {
            let _standard = Standard::enter();
            assert_eq!(halved().to_bits(), 1 << 22);
            let _again = Standard::enter();
        }
        assert_eq!(halved(), 0.0, "the mode before is restored");
        // Threads inherit the mode of the thread that starts them.
        let kept = std::thread::spawn(|| {
            standard_thread();
            halved() > 0.0
        });
        assert!(kept.join().unwrap());
        drop(foreign);
        assert!(halved() > 0.0);
    }
}
