//! The transport: generated messages and stubs, their conversion to domain types, and gRPC below the codec.

mod author;
mod channel;
mod codec;
mod commit;
mod convert;
pub mod dial;
pub mod direct;
pub mod frame;
pub mod local;
mod mark;
pub mod memfd;
mod parts;
mod request;
pub mod sink;
mod status;
pub mod tls;

pub use author::Author;
pub use channel::{Answer, Channel};
pub use codec::{Codec, Scope, no_room};
pub use commit::{left_outs_from_wire, left_outs_to_wire};
pub use convert::{
    Wire, array_from_wire, array_to_wire, chunk_from_wire, deadline, dtype_from_wire, dtype_to_wire,
    incarnation_from_wire, missing, param_to_wire, tier_from_wire,
};
pub use parts::pieces;
pub use status::{fault_from_status, fault_from_wire, fault_to_wire, status};

/// Generated from the .proto files by `tests/generated.rs`, which also says how to regenerate it.
#[allow(clippy::all, deprecated, unreachable_pub)]
pub mod v1 {
    include!("generated/longshore.v1.rs");
}

/// Descriptors of the services, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("generated/longshore.v1.bin");
