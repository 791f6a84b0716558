//! Every instruction set against the scalar reference, and the reference against what others say is right.

mod agreement;
mod code;
mod conversions;
mod data;
mod low;
mod oracle;
mod rounding;
mod trajectories;
