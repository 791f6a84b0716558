//! Need of a tier on a server.

/// The resources that a tier takes on a server, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreNeed {
    /// DRAM for state.
    pub state: u64,
    /// DRAM for buffers: between the state and the drives, or for copies of blocks that are being updated.
    pub buffers: u64,
    /// Space on drives.
    pub disk: u64,
    /// Bytes that a step writes to drives, without tables and records.
    pub written: u64,
}
