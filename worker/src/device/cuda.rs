//! NVIDIA GPUs through the driver API, which is loaded at run time: one binary runs with and without a GPU.
//!
//! Copies run on one non-blocking stream of their own, in the order in which they start. A framework finishes its
//! writes to a buffer (by synchronizing its stream) before that buffer is copied out.
#![allow(unsafe_code)]

use std::{ffi::c_void, mem, sync::Arc};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};

use super::{Budget, Buffer, Device, Event, HostBuffer, HostMemory, Lease, Transfer};
use crate::error::{DeviceError, Result};

const DRIVER: &str = "check `nvidia-smi`; the kernel's log may say more";

pub struct CudaDevice {
    name: String,
    budget: Budget,
    context: Arc<CudaContext>,
    copies: Arc<CudaStream>,
}

/// Device memory.
struct DeviceMemory {
    context: Arc<CudaContext>,
    address: sys::CUdeviceptr,
    _lease: Lease,
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: `allocate` got the address from the driver in this context, and only this drop frees it. A transfer
        // holds a clone of the buffer until the device is done with it.
        let freed = self.context.bind_to_thread().and_then(|()| unsafe { result::free_sync(self.address) });
        if let Err(error) = freed {
            tracing::error!(?error, "device memory could not be freed");
        }
    }
}

/// Page-locked host memory that the CPU reads fast. cudarc's own type is write-combined, and about 70 times slower
/// to read.
struct Pinned {
    context: Arc<CudaContext>,
    memory: *mut u8,
    bytes: usize,
}

// SAFETY: this value alone owns the memory, which any thread can reach. Calls of the driver first bind the context to
// the calling thread.
unsafe impl Send for Pinned {}

impl HostMemory for Pinned {
    fn bytes(&self) -> &[u8] {
        // SAFETY: `memory` points to `bytes` zeroed bytes that live until drop; `&self` excludes writers, and a transfer
        // that lets the device write owns the value.
        unsafe { std::slice::from_raw_parts(self.memory, self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the bytes live until drop, as above, and `&mut self` excludes all other users.
        unsafe { std::slice::from_raw_parts_mut(self.memory, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let freed = self.context.bind_to_thread().and_then(|()| {
            // SAFETY: `allocate_host` got the memory from the driver, and only this drop frees it.
            unsafe { result::free_host(self.memory.cast::<c_void>()) }
        });
        if let Err(error) = freed {
            tracing::error!(?error, "page-locked memory could not be freed");
        }
    }
}

/// A copy on the stream, which owns its source and target.
struct Copy {
    done: CudaEvent,
    device: String,
    /// None once the copy is over or was given up.
    ends: Option<(HostBuffer, Buffer)>,
}

impl Event for Copy {
    fn wait(&mut self) -> Result<HostBuffer> {
        let ends = self.ends.take();
        match (self.done.synchronize(), ends) {
            (Ok(()), Some((host, _))) => Ok(host),
            (Ok(()), None) => Ok(HostBuffer::new(Vec::new())),
            (Err(error), ends) => {
                // The GPU may still write: memory lost is better than memory corrupted.
                mem::forget(ends);
                Err(failed(&self.device, "cuEventSynchronize", error, DRIVER).into())
            }
        }
    }
}

fn failed(device: &str, call: &'static str, error: DriverError, remedy: &'static str) -> DeviceError {
    DeviceError { device: device.into(), call, cause: format!("{error:?}"), remedy }
}

/// Returns true if the driver's library is installed. Without the library any other driver call would panic.
fn has_driver() -> bool {
    // SAFETY: opens the driver library and closes it again; NVIDIA's has no unsound initialisers.
    unsafe { sys::is_culib_present() }
}

impl CudaDevice {
    /// Returns the number of GPUs that this process may use: 0 without a driver.
    pub fn count() -> usize {
        if !has_driver() {
            return 0;
        }
        match CudaContext::device_count() {
            Ok(count) => usize::try_from(count).unwrap_or(0),
            Err(error) => {
                tracing::info!(?error, "the NVIDIA driver is there but answers no GPU");
                0
            }
        }
    }

    /// Opens the GPU `ordinal`, with a budget in bytes; None takes all of its memory. The device uses the primary
    /// context, as torch and candle do.
    ///
    /// # Errors
    /// `Device` if there is no driver or no such GPU.
    pub fn new(ordinal: usize, budget: Option<u64>) -> Result<CudaDevice> {
        let name = format!("cuda:{ordinal}");
        if !has_driver() {
            return Err(DeviceError {
                device: name,
                call: "loading libcuda",
                cause: "not found".into(),
                remedy: "install the NVIDIA driver (in a container: run it with --gpus), or use the host device",
            }
            .into());
        }
        let fail = |call, error| failed(&name, call, error, "check `nvidia-smi` and CUDA_VISIBLE_DEVICES");
        let context = CudaContext::new(ordinal).map_err(|error| fail("cuDevicePrimaryCtxRetain", error))?;
        let copies = context.new_stream().map_err(|error| fail("cuStreamCreate", error))?;
        let total = context.total_mem().map_err(|error| fail("cuDeviceTotalMem", error))? as u64;
        let budget = Budget::new(name.clone(), budget.unwrap_or(total));
        Ok(CudaDevice { name, budget, context, copies })
    }

    fn bind(&self) -> Result<(), DeviceError> {
        self.context.bind_to_thread().map_err(|error| failed(&self.name, "cuCtxSetCurrent", error, DRIVER))
    }

    /// Returns the transfer of a started copy. Until an event after the copy has happened, the transfer owns both
    /// ends.
    fn transfer(&self, host: HostBuffer, device: &Buffer) -> Result<Transfer> {
        let done = match self.copies.record_event(None) {
            Ok(done) => done,
            Err(error) => {
                // Without an event the end of the copy is unknown, so its memory must outlive the process.
                mem::forget((host, device.clone()));
                return Err(failed(&self.name, "cuEventRecord", error, DRIVER).into());
            }
        };
        let ends = Some((host, device.clone()));
        Ok(Transfer::under_way(Copy { done, device: self.name.clone(), ends }))
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn budget(&self) -> &Budget {
        &self.budget
    }

    fn allocate(&self, field: &str, bytes: u64) -> Result<Buffer> {
        let lease = self.budget.reserve(field, bytes)?;
        self.bind()?;
        // The driver refuses zero bytes, so an empty buffer has one unused byte. SAFETY: the context is bound; the
        // memory is not read before something is copied in.
        let address = unsafe { result::malloc_sync(bytes.max(1) as usize) }.map_err(|error| {
            failed(
                &self.name,
                "cuMemAlloc",
                error,
                "another process may hold memory (`nvidia-smi`): lower the budget",
            )
        })?;
        Ok(Buffer::new(DeviceMemory { context: self.context.clone(), address, _lease: lease }, bytes))
    }

    fn allocate_host(&self, bytes: u64) -> Result<HostBuffer> {
        self.bind()?;
        let size = bytes.max(1) as usize;
        // SAFETY: the context is bound; portable memory may be used from every context.
        let memory =
            unsafe { result::malloc_host(size, sys::CU_MEMHOSTALLOC_PORTABLE) }.map_err(|error| {
                failed(
                    &self.name,
                    "cuMemHostAlloc",
                    error,
                    "the machine is short of memory to lock: free some",
                )
            })?;
        let memory = memory.cast::<u8>();
        // SAFETY: the driver just gave us `size` writable bytes.
        unsafe { memory.write_bytes(0, size) };
        Ok(HostBuffer::new(Pinned { context: self.context.clone(), memory, bytes: bytes as usize }))
    }

    fn copy_in(&self, source: HostBuffer, target: &Buffer, offset: u64) -> Result<Transfer> {
        source.check::<Pinned>(&self.name)?;
        let memory: &DeviceMemory = target.memory(&self.name, offset, source.len() as u64)?;
        self.bind()?;
        // SAFETY: `memory` checked the bounds. The transfer owns both ends until its event has happened. `check`
        // found the source to be page-locked memory, which does not move with its owner.
        unsafe { result::memcpy_htod_async(memory.address + offset, &source, self.copies.cu_stream()) }
            .map_err(|error| failed(&self.name, "cuMemcpyHtoDAsync", error, DRIVER))?;
        self.transfer(source, target)
    }

    fn copy_out(&self, source: &Buffer, offset: u64, mut target: HostBuffer) -> Result<Transfer> {
        target.check::<Pinned>(&self.name)?;
        let memory: &DeviceMemory = source.memory(&self.name, offset, target.len() as u64)?;
        self.bind()?;
        // SAFETY: as in `copy_in`. No code reads the target before the transfer returns it.
        unsafe { result::memcpy_dtoh_async(&mut target, memory.address + offset, self.copies.cu_stream()) }
            .map_err(|error| failed(&self.name, "cuMemcpyDtoHAsync", error, DRIVER))?;
        self.transfer(target, source)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::error::Error;

    /// Opens the first GPU. Without a GPU the test counts as skipped, as with `skipped` of the tests' crate.
    fn gpu(budget: u64) -> Option<CudaDevice> {
        let error = match CudaDevice::new(0, Some(budget)) {
            Ok(device) => return Some(device),
            Err(error) => error,
        };
        let thread = std::thread::current();
        let line = format!("{}: {}: no GPU: {error}\n", file!(), thread.name().unwrap_or("a test"));
        eprint!("skipped: {line}");
        if let Some(path) = std::env::var_os("LONGSHORE_TEST_SKIPPED") {
            let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
            file.unwrap().write_all(line.as_bytes()).unwrap();
        }
        None
    }

    #[test]
    fn without_a_gpu_the_error_is_typed() {
        assert!(matches!(CudaDevice::new(9999, None), Err(Error::Device(_))));
    }

    #[test]
    fn bytes_go_to_the_gpu_and_back() {
        let Some(device) = gpu(8 << 20) else { return };
        let buffer = device.allocate("weights", 4 << 20).unwrap();
        let mut host = device.allocate_host(1 << 20).unwrap();
        host.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index % 251) as u8);
        let mut host = device.copy_in(host, &buffer, 3 << 20).unwrap().wait().unwrap();
        host.fill(0);
        // The transfer is dropped without a wait: its memory must outlive the copy.
        drop(device.copy_out(&buffer, 0, device.allocate_host(1 << 20).unwrap()).unwrap());
        let host = device.copy_out(&buffer, 3 << 20, host).unwrap().wait().unwrap();
        assert!(host.iter().enumerate().all(|(index, byte)| *byte == (index % 251) as u8));
        assert!(matches!(device.allocate("more", 5 << 20), Err(Error::Shortage(_))));
        assert!(matches!(device.copy_in(host, &buffer, 4 << 20), Err(Error::Device(_))));
        drop(buffer);
        assert_eq!((device.budget().used(), device.budget().peak()), (0, 4 << 20));
    }

    #[test]
    fn another_devices_buffers_are_refused() {
        let Some(device) = gpu(1 << 20) else { return };
        let host = super::super::HostDevice::new(1 << 20);
        let foreign = host.allocate("weights", 64).unwrap();
        let bytes = device.allocate_host(64).unwrap();
        assert!(matches!(device.copy_in(bytes, &foreign, 0), Err(Error::Device(_))));
        let buffer = device.allocate("weights", 64).unwrap();
        let pageable = host.allocate_host(64).unwrap();
        assert!(matches!(device.copy_in(pageable, &buffer, 0), Err(Error::Device(_))));
        let pageable = host.allocate_host(64).unwrap();
        assert!(matches!(device.copy_out(&buffer, 0, pageable), Err(Error::Device(_))));
    }
}
