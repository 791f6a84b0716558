//! x86-64: the lanes of AVX2 and AVX-512, and the kernels made of them.

pub(super) mod avx2;
pub(super) mod avx512;
