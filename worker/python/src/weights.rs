//! Weights on their way into tensors: their version, their source, and each tensor's place.

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use longshore_proto::{Dtype, Fault, Layout, Version};
use longshore_worker::{Feed, Result, Session, error::Misuse, export::Contents};

use crate::memory::HostTensor;

/// Weights of one version, and the parameters whose tensors lack them.
pub(crate) struct Unread {
    pub(crate) version: Version,
    pub(crate) from: From,
    pub(crate) left: BTreeSet<usize>,
}

/// The source of weights.
#[derive(Clone)]
pub(crate) enum From {
    /// The version's images.
    Images(Feed),
    /// The version's images, pulled when they are fetched.
    OnDemand,
    /// The master weights of the whole flat space, rounded to the images' type.
    Master(Arc<Vec<u8>>),
}

impl From {
    /// Waits for the elements at `place`, and writes them into the tensor.
    pub(crate) fn write(&self, dtype: Dtype, target: &HostTensor, place: Range<u64>) -> Result<()> {
        match self {
            From::OnDemand => Err(Misuse("weights in units are fetched: use fetch").into()),
            From::Images(feed) => target.read_weights(feed, place),
            From::Master(weights) => {
                let bytes = place.start * dtype.bytes()..place.end * dtype.bytes();
                target.write_from(0, dtype, &weights[bytes.start as usize..bytes.end as usize]);
                Ok(())
            }
        }
    }
}

/// Tensors, and the weights that they wait for.
pub(crate) struct Weighed {
    pub(crate) from: From,
    pub(crate) dtype: Dtype,
    pub(crate) targets: Vec<(HostTensor, Range<u64>)>,
}

impl Weighed {
    /// Returns true if a server lends the weights in its memory.
    pub(crate) fn are_lent(&self) -> bool {
        matches!(&self.from, From::Images(feed) if feed.is_lent())
    }

    /// Waits for the weights and writes them into the tensors.
    pub(crate) fn write(self) -> Result<()> {
        let Weighed { from, dtype, targets } = self;
        let written = targets.into_iter().try_for_each(|(target, place)| from.write(dtype, &target, place));
        written.map_err(|error| match &from {
            From::Images(feed) => feed.cause(error),
            From::OnDemand | From::Master(_) => error,
        })
    }
}

/// Range of each parameter in the flat space.
pub(crate) struct Places(Vec<Range<u64>>);

impl Places {
    pub(crate) fn new(layout: &Layout, params: usize) -> Places {
        Places((0..params).map(|param| layout.param_range(param)).collect())
    }

    /// Returns the parameters whose first element is read.
    pub(crate) fn read_by(&self, reads: impl Fn(u64) -> bool) -> BTreeSet<usize> {
        let places = self.0.iter().enumerate();
        places.filter(|(_, place)| reads(place.start)).map(|(param, _)| param).collect()
    }

    /// Returns the range of a parameter.
    pub(crate) fn at(&self, param: usize) -> Result<Range<u64>> {
        self.0.get(param).cloned().ok_or_else(|| {
            let limit = format!("below {} parameters", self.0.len());
            Fault::invalid("tensor", param, limit, "name the parameters in the job's order").into()
        })
    }

    /// Returns the range of a tensor that is a whole parameter.
    pub(crate) fn of(&self, tensor: &HostTensor) -> Result<Range<u64>> {
        match self.at(tensor.param)? {
            place if place.end - place.start == tensor.elements() => Ok(place),
            place => {
                let limit = format!("{} elements", place.end - place.start);
                let remedy = "name the parameters in the job's order";
                Err(Fault::invalid("tensor", tensor.elements(), limit, remedy).into())
            }
        }
    }

    /// Returns the range of a tensor that is a part of a parameter, from its element `start` on.
    pub(crate) fn of_part(&self, tensor: &HostTensor, start: u64) -> Result<Range<u64>> {
        self.part(tensor.param, start, tensor.elements())
    }

    /// Returns the range of `elements` elements of a parameter, from `start` on.
    pub(crate) fn part(&self, param: usize, start: u64, elements: u64) -> Result<Range<u64>> {
        let place = self.at(param)?;
        match start.checked_add(elements).filter(|&end| end <= place.end - place.start) {
            Some(end) => Ok(place.start + start..place.start + end),
            None => {
                let limit = format!("a part of {} elements", place.end - place.start);
                let value = format!("{elements} elements from {start} on");
                Err(Fault::invalid("tensor", value, limit, "name parts of the job's parameters").into())
            }
        }
    }
}

/// Exports the master weights of `version`, which must be the newest, rounded to the images' type.
pub(crate) fn master(session: &Session, version: Version) -> Result<Arc<Vec<u8>>> {
    let (dtype, elements) = (session.spec().image_dtype, session.layout().elements());
    let weights = Mutex::new(vec![0; (elements * dtype.bytes()) as usize]);
    let exported = session.export(Contents::Weights(dtype), &|_, at, bytes: &[u8]| {
        let start = (at * dtype.bytes()) as usize;
        let mut weights = weights.lock().unwrap_or_else(PoisonError::into_inner);
        weights[start..start + bytes.len()].copy_from_slice(bytes);
        Ok(())
    })?;
    if exported.version != version {
        let remedy = "call flush on all ranks after the same step";
        return Err(Fault::invalid("flush.version", exported.version, version, remedy).into());
    }
    Ok(Arc::new(weights.into_inner().unwrap_or_else(PoisonError::into_inner)))
}
