//! AArch64: the lanes of NEON, and the kernels made of them.

pub(super) mod neon;
