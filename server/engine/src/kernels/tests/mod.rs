//! Every instruction set against the scalar reference, and the reference against others' definitions.

mod agreement;
mod conversions;
mod data;
mod low;
