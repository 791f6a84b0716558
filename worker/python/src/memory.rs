//! Tensors of Python as slices of host memory: the only module of this crate with `unsafe`.

use std::{
    ops::Range,
    slice,
    sync::{Mutex, PoisonError},
};

use longshore_memory::{copy_past_caches, float::Standard};
use longshore_proto::{Dtype, Fault, limits::CHUNK_BYTES};
use longshore_worker::{Feed, Result, convert};
use pyo3::{FromPyObject, prelude::*};

use crate::{error::raise, helpers::spread};

/// Elements per tile of a conversion between two types other than f32: a tile stays in the L1 cache.
const TILE: usize = 2048;
/// Copies by several threads are cut into parts of this many elements. A copy of fewer than `LEAST_PARTS` parts is not
/// cut: a thread wakes only after another has copied two parts. On busy cores two threads copied four parts no sooner
/// than one thread, with 1.5 times the CPU time.
const PART_ELEMENTS: usize = 256 * 1024;
const LEAST_PARTS: usize = 8;

/// Elements of a parameter or of its gradient in host memory, contiguous, in the order of its shape.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostTensor {
    /// Number of the job's parameter.
    pub(crate) param: usize,
    address: usize,
    elements: usize,
    dtype: Dtype,
}

/// A tensor as Python describes it: parameter, address, number of elements, name of the element type.
type Given = (usize, usize, usize, String);

impl<'py> FromPyObject<'_, 'py> for HostTensor {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<HostTensor> {
        let (param, address, elements, dtype): Given = given.extract()?;
        let fault = |fault: Fault| raise(given.py(), &fault.into());
        let dtype: Dtype = dtype.parse().map_err(fault)?;
        let width = dtype.bytes() as usize;
        let is_sound = elements == 0 || address != 0 && address.is_multiple_of(width);
        if !is_sound || elements > isize::MAX as usize / width {
            let limit = format!("aligned memory of {elements} elements of {dtype}");
            return Err(fault(Fault::invalid(
                "tensor.address",
                address,
                limit,
                "give a contiguous CPU tensor",
            )));
        }
        // An empty tensor may have no memory at all.
        let address = if elements == 0 { width } else { address };
        Ok(HostTensor { param, address, elements, dtype })
    }
}

impl HostTensor {
    pub(crate) fn elements(&self) -> u64 {
        self.elements as u64
    }

    fn bytes(&self) -> &[u8] {
        let length = self.elements * self.dtype.bytes() as usize;
        // SAFETY: the package alone makes these, of contiguous CPU tensors that its caller's frame holds until the call
        // returns, and `extract` has checked alignment and length. Every bit pattern is a byte. Other Python threads run
        // meanwhile, as they do beside torch's own loops: one that writes to a tensor in the middle of a step breaks
        // torch's rules as well.
        unsafe { slice::from_raw_parts(self.address as *const u8, length) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let length = self.elements * self.dtype.bytes() as usize;
        // SAFETY: as in `bytes`; `read_weights` alone writes while it runs, and its parts are apart.
        unsafe { slice::from_raw_parts_mut(self.address as *mut u8, length) }
    }

    /// Returns the elements, if they are f32.
    fn values(&self) -> Option<&[f32]> {
        // SAFETY: as in `bytes`; the address is aligned to the element, and every bit pattern is an f32.
        let values = || unsafe { slice::from_raw_parts(self.address as *const f32, self.elements) };
        (self.dtype == Dtype::F32).then(values)
    }

    fn values_mut(&mut self) -> Option<&mut [f32]> {
        // SAFETY: as in `bytes_mut` and `values`.
        let values = || unsafe { slice::from_raw_parts_mut(self.address as *mut f32, self.elements) };
        (self.dtype == Dtype::F32).then(values)
    }

    /// Writes a range of the elements, times `scale`, in the wire's type, in a single copy or conversion.
    pub(crate) fn write_to(&self, range: Range<usize>, wire: Dtype, scale: f32, target: &mut [u8]) {
        let width = wire.bytes() as usize;
        // Payloads for a socket are chunks, whose checksum is taken next, so they stay in cache. Lent payloads are
        // longer, and are written past the caches.
        let past_caches = target.len() > CHUNK_BYTES;
        let parts: Vec<_> = target.chunks_mut(part_of(range.len()) * width).map(Mutex::new).collect();
        spread(parts.len(), |index| {
            let target = &mut **parts[index].lock().unwrap_or_else(PoisonError::into_inner);
            let start = range.start + index * PART_ELEMENTS;
            self.write_part(start..start + target.len() / width, wire, scale, past_caches, target);
        });
    }

    fn write_part(&self, range: Range<usize>, wire: Dtype, scale: f32, past_caches: bool, target: &mut [u8]) {
        let width = self.dtype.bytes() as usize;
        let source = &self.bytes()[range.start * width..range.end * width];
        match self.values() {
            _ if scale == 1.0 && wire == self.dtype && past_caches => copy_past_caches(source, target),
            _ if scale == 1.0 && wire == self.dtype => target.copy_from_slice(source),
            Some(values) if scale == 1.0 => convert::from_f32(wire, &values[range], target),
            _ => scaled(self.dtype, source, scale, wire, target),
        }
    }

    /// Takes elements from `at` on, in the wire's type. Elements beyond the tensor's end are dropped.
    pub(crate) fn write_from(&self, at: usize, wire: Dtype, source: &[u8]) {
        let (from, to) = (wire.bytes() as usize, self.dtype.bytes() as usize);
        let elements = (source.len() / from).min(self.elements.saturating_sub(at));
        let (address, source) = (self.address + at * to, &source[..elements * from]);
        // SAFETY: as in `bytes`; the range lies in the tensor, and two threads never write the same element, since each
        // comes once from one server.
        let target = unsafe { slice::from_raw_parts_mut(address as *mut u8, elements * to) };
        if wire == self.dtype {
            copy_past_caches(source, target);
        } else {
            scaled(wire, source, 1.0, self.dtype, target);
        }
    }

    /// Waits for the elements of a feed at `place`, and writes them into this tensor.
    pub(crate) fn read_weights(self, feed: &Feed, place: Range<u64>) -> Result<()> {
        let mut at = place.start;
        while at < place.end {
            let there = at..feed.wait_for_some(at..place.end)?;
            at = there.end;
            let elements = (there.end - there.start) as usize;
            let failed = Mutex::new(Ok(()));
            spread(elements.div_ceil(part_of(elements)), |index| {
                let start = there.start + (index * PART_ELEMENTS) as u64;
                let part = start..there.end.min(start + part_of(elements) as u64);
                let read = self.part(&place, &part).read_part(feed, part);
                if read.is_err() {
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) = read;
                }
            });
            failed.into_inner().unwrap_or_else(PoisonError::into_inner)?;
        }
        Ok(())
    }

    /// Returns the elements of this tensor that lie at `part`, if the whole tensor lies at `place`.
    fn part(&self, place: &Range<u64>, part: &Range<u64>) -> HostTensor {
        let first = (part.start - place.start) as usize;
        let elements = ((part.end - part.start) as usize).min(self.elements.saturating_sub(first));
        HostTensor { address: self.address + first * self.dtype.bytes() as usize, elements, ..*self }
    }

    /// Writes elements of a feed that have arrived.
    fn read_part(mut self, feed: &Feed, place: Range<u64>) -> Result<()> {
        if self.dtype == feed.dtype() {
            return feed.read_raw(place, self.bytes_mut());
        }
        if let Some(values) = self.values_mut() {
            return feed.read(place, values);
        }
        let (wire, dtype) = (feed.dtype(), self.dtype);
        let (from, to) = (wire.bytes() as usize, dtype.bytes() as usize);
        let target = self.bytes_mut();
        feed.pieces(place, |at, bytes| {
            let start = at as usize * to;
            let end = start + bytes.len() / from * to;
            // `Job` has refused elements beyond the tensor's end.
            if let Some(target) = target.get_mut(start..end) {
                scaled(wire, bytes, 1.0, dtype, target);
            }
        })
    }
}

/// Returns the number of elements of a part, for a copy of `elements` by one thread or several.
fn part_of(elements: usize) -> usize {
    if elements < LEAST_PARTS * PART_ELEMENTS { elements.max(1) } else { PART_ELEMENTS }
}

/// Converts through f32, times `scale`.
fn scaled(from: Dtype, source: &[u8], scale: f32, to: Dtype, target: &mut [u8]) {
    let _standard = Standard::enter();
    let mut tile = [0.0; TILE];
    let pieces =
        source.chunks(TILE * from.bytes() as usize).zip(target.chunks_mut(TILE * to.bytes() as usize));
    for (source, target) in pieces {
        let tile = &mut tile[..source.len() / from.bytes() as usize];
        convert::to_f32(from, source, tile);
        tile.iter_mut().for_each(|value| *value *= scale);
        convert::from_f32(to, tile, target);
    }
}
