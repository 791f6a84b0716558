//! The host as a device, for runs without an accelerator and for tests.

use std::sync::Mutex;

use super::{Budget, Buffer, Device, HostBuffer, Lease, Transfer};
use crate::{
    error::{DeviceError, Result},
    lock,
};

pub struct HostDevice {
    budget: Budget,
}

struct HostBytes {
    bytes: Mutex<Vec<u8>>,
    _lease: Lease,
}

const NAME: &str = "host";

impl HostDevice {
    /// `budget` is in bytes.
    pub fn new(budget: u64) -> HostDevice {
        HostDevice { budget: Budget::new(NAME, budget) }
    }
}

impl Device for HostDevice {
    fn name(&self) -> &str {
        NAME
    }

    fn budget(&self) -> &Budget {
        &self.budget
    }

    fn allocate(&self, field: &str, bytes: u64) -> Result<Buffer> {
        let lease = self.budget.reserve(field, bytes)?;
        let memory = HostBytes { bytes: Mutex::new(zeroed(bytes)?), _lease: lease };
        Ok(Buffer::new(memory, bytes))
    }

    fn allocate_host(&self, bytes: u64) -> Result<HostBuffer> {
        Ok(HostBuffer::new(zeroed(bytes)?))
    }

    fn copy_in(&self, source: HostBuffer, target: &Buffer, offset: u64) -> Result<Transfer> {
        let memory: &HostBytes = target.memory(NAME, offset, source.len() as u64)?;
        let start = offset as usize;
        lock(&memory.bytes)[start..start + source.len()].copy_from_slice(&source);
        Ok(Transfer::done(source))
    }

    fn copy_out(&self, source: &Buffer, offset: u64, mut target: HostBuffer) -> Result<Transfer> {
        let memory: &HostBytes = source.memory(NAME, offset, target.len() as u64)?;
        let start = offset as usize;
        let end = start + target.len();
        target.copy_from_slice(&lock(&memory.bytes)[start..end]);
        Ok(Transfer::done(target))
    }
}

/// Returns zeroed memory. A failed allocation is an error here, where the allocator would abort the process.
fn zeroed(bytes: u64) -> Result<Vec<u8>> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(bytes as usize).map_err(|error| DeviceError {
        device: NAME.into(),
        call: "allocate",
        cause: error.to_string(),
        remedy: "free memory, or lower the budget below what the machine has",
    })?;
    memory.resize(bytes as usize, 0);
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn bytes_go_in_and_out() {
        let device = HostDevice::new(1 << 20);
        let buffer = device.allocate("weights", 64).unwrap();
        let mut host = device.allocate_host(16).unwrap();
        host.copy_from_slice(&[7; 16]);
        let mut host = device.copy_in(host, &buffer, 48).unwrap().wait().unwrap();
        host.fill(0);
        let host = device.copy_out(&buffer, 48, host).unwrap().wait().unwrap();
        assert_eq!(&host[..], [7; 16]);
        assert!(matches!(device.copy_in(host, &buffer, 49), Err(Error::Device(_))));
        assert!(matches!(device.allocate("more", 1 << 20), Err(Error::Shortage(_))));
        drop(buffer);
        assert_eq!(device.budget().used(), 0);
    }
}
