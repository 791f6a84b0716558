//! Every instruction set against the scalar reference, and the reference against what others say is right.

mod agreement;
mod conversions;
mod data;
mod oracle;
