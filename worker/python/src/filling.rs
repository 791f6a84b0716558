//! Fillings of a new job from Python: the parameters' weights, or tensors of a checkpoint one by one.

use std::cell::RefCell;

use longshore_proto::{Dtype, Fault, LeftOut, StateArray};
use longshore_worker::{Filling, Result};
use pyo3::{Py, PyAny, Python, types::PyAnyMethods};

use crate::{error::raised, memory::HostTensor};

/// The weights alone, one tensor for each parameter.
pub(crate) struct Weights(pub(crate) Vec<HostTensor>);

/// A filling as Python gives it. The first item is the number of updates that made the state, or None for weights
/// alone. The second lists parameters with fewer updates, each with the number of missing updates. The third is the
/// callable that returns each tensor.
pub(crate) type Given = (Option<u64>, Vec<(u32, u64)>, Py<PyAny>);

/// Tensors that Python reads on request. A single tensor of each array is in memory at a time.
pub(crate) struct Read {
    applied: Option<u64>,
    left_out: Vec<LeftOut>,
    /// Called with the numbers of an array and a parameter. Returns a tensor's place, and the owner of its memory.
    source: Py<PyAny>,
    held: RefCell<[Option<Held>; 3]>,
}

struct Held {
    tensor: HostTensor,
    _holder: Py<PyAny>,
}

impl Read {
    pub(crate) fn new((applied, left_out, source): Given) -> Read {
        let left_out = left_out.into_iter().map(|(param, steps)| LeftOut { param, steps, now: false });
        Read { applied, left_out: left_out.collect(), source, held: RefCell::default() }
    }

    fn fetch(&self, array: StateArray, param: usize) -> Result<Held> {
        Python::attach(|py| {
            let given = self.source.bind(py).call1((array.index(), param));
            given.and_then(|given| given.extract::<(HostTensor, Py<PyAny>)>()).map_err(raised)
        })
        .map(|(tensor, holder)| Held { tensor, _holder: holder })
    }
}

/// Weights that Python makes on request, piece by piece. The callable takes a parameter's number, its first
/// element and a count. The result is a tensor's place, and the owner of its memory.
pub(crate) struct Pieces(pub(crate) Py<PyAny>);

impl Filling for Pieces {
    fn applied(&self) -> Option<u64> {
        None
    }

    fn write(&self, _: StateArray, param: usize, at: u64, target: &mut [u8]) -> Result<()> {
        let count = target.len() / size_of::<f32>();
        let (tensor, _holder) = Python::attach(|py| {
            let given = self.0.bind(py).call1((param, at, count));
            given.and_then(|given| given.extract::<(HostTensor, Py<PyAny>)>()).map_err(raised)
        })?;
        write(&tensor, 0, target)
    }
}

impl Filling for Weights {
    fn applied(&self) -> Option<u64> {
        None
    }

    fn write(&self, _: StateArray, param: usize, at: u64, target: &mut [u8]) -> Result<()> {
        match self.0.get(param) {
            Some(tensor) => write(tensor, at, target),
            None => {
                Err(Fault::invalid("params", self.0.len(), "all of the job's", "name every parameter").into())
            }
        }
    }
}

impl Filling for Read {
    fn applied(&self) -> Option<u64> {
        self.applied
    }

    fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }

    fn write(&self, array: StateArray, param: usize, at: u64, target: &mut [u8]) -> Result<()> {
        let mut held = self.held.borrow_mut();
        let held = &mut held[array.index()];
        if held.as_ref().is_none_or(|held| held.tensor.param != param) {
            // The memory of the previous tensor is freed first.
            Python::attach(|_| *held = None);
            *held = Some(self.fetch(array, param)?);
        }
        match held {
            Some(held) => write(&held.tensor, at, target),
            None => Ok(()),
        }
    }
}

fn write(tensor: &HostTensor, at: u64, target: &mut [u8]) -> Result<()> {
    let range = at as usize..at as usize + target.len() / size_of::<f32>();
    if range.end as u64 > tensor.elements() {
        let limit = format!("at least {}", range.end);
        let remedy = "give a tensor of the parameter's shape";
        return Err(Fault::invalid("tensor.elements", tensor.elements(), limit, remedy).into());
    }
    tensor.write_to(range, Dtype::F32, 1.0, target);
    Ok(())
}
