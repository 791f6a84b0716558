//! Copies between the host's memory, where the trainer computes, and a device.

use std::{collections::HashMap, sync::Arc};

use longshore_worker::{
    device::{Buffer, Device, HostBuffer, Transfer},
    error::Result,
};

use super::gpt::BoxError;

/// Host buffers for copies, one of each size. Buffers are reused, since page-locking one takes far longer than a
/// copy.
pub(super) struct Staging {
    device: Arc<dyn Device>,
    idle: HashMap<u64, HostBuffer>,
    /// The last copy to the device. The next copy in either direction waits for it.
    under_way: Option<Transfer>,
}

impl Staging {
    pub(super) fn new(device: Arc<dyn Device>) -> Staging {
        Staging { device, idle: HashMap::new(), under_way: None }
    }

    /// Starts to copy `bytes`, which `fill` writes, to `offset` of `target`.
    pub(super) fn copy_in(
        &mut self,
        target: &Buffer,
        offset: u64,
        bytes: u64,
        fill: impl FnOnce(&mut [u8]) -> Result<(), BoxError>,
    ) -> Result<(), BoxError> {
        let mut host = self.take(bytes)?;
        fill(&mut host)?;
        self.under_way = Some(self.device.copy_in(host, target, offset)?);
        Ok(())
    }

    /// Passes `bytes` from `offset` of `source` to `read`.
    pub(super) fn copy_out<R>(
        &mut self,
        source: &Buffer,
        offset: u64,
        bytes: u64,
        read: impl FnOnce(&[u8]) -> Result<R, BoxError>,
    ) -> Result<R, BoxError> {
        let host = self.take(bytes)?;
        let host = self.device.copy_out(source, offset, host)?.wait()?;
        let result = read(&host);
        self.idle.insert(bytes, host);
        result
    }

    fn take(&mut self, bytes: u64) -> Result<HostBuffer> {
        if let Some(transfer) = self.under_way.take() {
            let host = transfer.wait()?;
            self.idle.insert(host.len() as u64, host);
        }
        self.idle.remove(&bytes).map_or_else(|| self.device.allocate_host(bytes), Ok)
    }
}
