//! Memory for units: the device's, and the host's that copies go through. Both are used again.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    device::{Buffer, Device, HostBuffer},
    error::Result,
};

const FIELD: &str = "16-bit weights of a unit";

pub(super) struct Memory {
    device: Arc<dyn Device>,
    /// The most bytes of device memory, in use and idle.
    capacity: u64,
    allocated: u64,
    idle: BTreeMap<u64, Vec<Buffer>>,
    hosts: BTreeMap<u64, Vec<HostBuffer>>,
}

impl Memory {
    pub(super) fn new(device: Arc<dyn Device>, capacity: u64) -> Memory {
        Memory { device, capacity, allocated: 0, idle: BTreeMap::new(), hosts: BTreeMap::new() }
    }

    /// Memory for so many bytes. Idle memory of other sizes makes room.
    pub(super) fn take(&mut self, bytes: u64) -> Result<Buffer> {
        if let Some(buffer) = self.idle.get_mut(&bytes).and_then(Vec::pop) {
            return Ok(buffer);
        }
        while self.allocated + bytes > self.capacity && self.free_one() {}
        let mut taken = self.device.allocate(FIELD, bytes);
        while taken.is_err() && self.free_one() {
            taken = self.device.allocate(FIELD, bytes);
        }
        let buffer = taken?;
        self.allocated += bytes;
        Ok(buffer)
    }

    pub(super) fn give_back(&mut self, buffer: Buffer) {
        self.idle.entry(buffer.bytes()).or_default().push(buffer);
    }

    /// Frees the largest idle buffer.
    fn free_one(&mut self) -> bool {
        let Some((bytes, buffer)) =
            self.idle.iter_mut().rev().find_map(|(bytes, idle)| Some((*bytes, idle.pop()?)))
        else {
            return false;
        };
        self.allocated -= bytes;
        drop(buffer);
        true
    }

    /// Host memory that the device copies from and to.
    pub(super) fn take_host(&mut self, bytes: u64) -> Result<HostBuffer> {
        let idle = self.hosts.get_mut(&bytes).and_then(Vec::pop);
        idle.map_or_else(|| self.device.allocate_host(bytes), Ok)
    }

    pub(super) fn give_back_host(&mut self, host: HostBuffer) {
        self.hosts.entry(host.len() as u64).or_default().push(host);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::HostDevice;

    #[test]
    fn idle_memory_is_used_again_or_makes_room() {
        let device = Arc::new(HostDevice::new(100));
        let mut memory = Memory::new(device.clone(), 90);
        let (first, second) = (memory.take(40).unwrap(), memory.take(50).unwrap());
        memory.give_back(first);
        drop(memory.take(40).unwrap());
        memory.give_back(second);
        // The device has room for 60 bytes more only without what is idle.
        let third = memory.take(60).unwrap();
        assert!(device.budget().used() <= 90, "{}", device.budget().used());
        assert!(memory.take(50).is_err());
        drop(third);
    }
}
