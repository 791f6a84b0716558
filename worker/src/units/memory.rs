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
    /// The bytes of `hosts`: at most `capacity`, so that units of many sizes do not keep one buffer each.
    idle_hosts: u64,
}

impl Memory {
    pub(super) fn new(device: Arc<dyn Device>, capacity: u64) -> Memory {
        Memory {
            device,
            capacity,
            allocated: 0,
            idle: BTreeMap::new(),
            hosts: BTreeMap::new(),
            idle_hosts: 0,
        }
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
        let Some(idle) = self.hosts.get_mut(&bytes).and_then(Vec::pop) else {
            return self.device.allocate_host(bytes);
        };
        self.idle_hosts -= bytes;
        Ok(idle)
    }

    /// Returns what gives way to it. To free page-locked memory waits for the device, so drop that outside of the lock.
    #[must_use]
    pub(super) fn give_back_host(&mut self, host: HostBuffer) -> Vec<HostBuffer> {
        let bytes = host.len() as u64;
        let mut freed = Vec::new();
        while self.idle_hosts + bytes > self.capacity
            && let Some(host) = self.take_idle_host()
        {
            self.idle_hosts -= host.len() as u64;
            freed.push(host);
        }
        self.idle_hosts += bytes;
        self.hosts.entry(bytes).or_default().push(host);
        freed
    }

    /// An idle buffer of the host that is needed least: one of several of a size, or else the largest.
    fn take_idle_host(&mut self) -> Option<HostBuffer> {
        let spare = self.hosts.values_mut().rev().find(|idle| idle.len() > 1).and_then(Vec::pop);
        spare.or_else(|| self.hosts.values_mut().rev().find_map(Vec::pop))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::HostDevice;

    #[test]
    fn idle_memory_of_the_host_is_no_more_than_the_devices() {
        let mut memory = Memory::new(Arc::new(HostDevice::new(100)), 90);
        let all: Vec<HostBuffer> = [20, 30, 60].map(|bytes| memory.take_host(bytes).unwrap()).into();
        let freed: Vec<u64> = all
            .into_iter()
            .flat_map(|host| memory.give_back_host(host))
            .map(|host| host.len() as u64)
            .collect();
        assert_eq!(freed, [30]);
        // What came last is kept, and of the others what fits beside it.
        assert_eq!((memory.idle_hosts, memory.hosts[&20].len(), memory.hosts[&60].len()), (80, 1, 1));
        drop(memory.take_host(60).unwrap());
        assert_eq!(memory.idle_hosts, 20);
    }

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
