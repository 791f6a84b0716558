//! Chooses a run's device by name, or by the GPUs of the machine.

use std::{fmt, str::FromStr, sync::Arc};

use longshore_proto::Fault;

use super::{Device, HostDevice};
use crate::error::Result;

/// The values of `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A GPU if there is one, otherwise the host.
    #[default]
    Auto,
    Host,
    /// A GPU by its number. Without a number the ranks take the GPUs in turn.
    Cuda(Option<usize>),
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Host => f.write_str("host"),
            DeviceChoice::Cuda(None) => f.write_str("cuda"),
            DeviceChoice::Cuda(Some(ordinal)) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Self, Fault> {
        let refused = || {
            let remedy = "a GPU's number is the one that nvidia-smi shows";
            Fault::invalid("device", text, "auto, host, cuda or cuda:N", remedy)
        };
        match text {
            "auto" => Ok(DeviceChoice::Auto),
            "host" | "cpu" => Ok(DeviceChoice::Host),
            "cuda" => Ok(DeviceChoice::Cuda(None)),
            _ => {
                let ordinal = text.strip_prefix("cuda:").ok_or_else(refused)?;
                Ok(DeviceChoice::Cuda(Some(ordinal.parse().map_err(|_| refused())?)))
            }
        }
    }
}

impl DeviceChoice {
    /// Opens the device of a rank. `budget` is in bytes; None means a GPU's whole memory, and no limit on the
    /// host.
    ///
    /// # Errors
    /// `Device` if the named GPU does not exist, or if the GPU that was found cannot be used.
    pub fn open(self, rank: u32, budget: Option<u64>) -> Result<Arc<dyn Device>> {
        let ordinal = match self {
            DeviceChoice::Host => None,
            DeviceChoice::Cuda(Some(ordinal)) => Some(ordinal),
            // Without a GPU, the error of opening `cuda:0` says what is missing.
            DeviceChoice::Cuda(None) => Some(next(rank, gpu::count()).unwrap_or(0)),
            DeviceChoice::Auto => next(rank, gpu::count()),
        };
        Ok(match ordinal {
            Some(ordinal) => gpu::open(ordinal, budget)?,
            None => Arc::new(HostDevice::new(budget.unwrap_or(u64::MAX))),
        })
    }
}

/// Returns the GPU of a rank. The ranks of a host have consecutive numbers, so they spread over its GPUs.
fn next(rank: u32, gpus: usize) -> Option<usize> {
    (rank as usize).checked_rem(gpus)
}

/// The GPUs that this build can use.
#[cfg(feature = "cuda")]
mod gpu {
    use std::sync::Arc;

    use super::{super::CudaDevice, Device, Result};

    pub(super) fn count() -> usize {
        CudaDevice::count()
    }

    pub(super) fn open(ordinal: usize, budget: Option<u64>) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(CudaDevice::new(ordinal, budget)?))
    }
}

/// A build without the feature `cuda` has no GPU.
#[cfg(not(feature = "cuda"))]
mod gpu {
    use std::sync::Arc;

    use super::{Device, Result};
    use crate::error::DeviceError;

    pub(super) fn count() -> usize {
        0
    }

    pub(super) fn open(ordinal: usize, _budget: Option<u64>) -> Result<Arc<dyn Device>> {
        let cause = "this build cannot use GPUs".into();
        let remedy = "build with the feature `cuda`, or use the device `host`";
        Err(DeviceError { device: format!("cuda:{ordinal}"), call: "open", cause, remedy }.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_choice_is_read_as_it_is_written() {
        for text in ["auto", "host", "cuda", "cuda:3"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        for text in ["gpu", "cuda:", "cuda:-1", "cuda:x", ""] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap_err().value, text);
        }
    }

    #[test]
    fn ranks_spread_over_the_gpus_there_are() {
        assert_eq!([0, 1, 2, 3].map(|rank| next(rank, 2)), [Some(0), Some(1), Some(0), Some(1)]);
        assert_eq!(next(5, 0), None);
    }

    #[test]
    fn a_gpu_is_used_where_there_is_one_and_demanded_where_it_is_named() {
        let gpus = gpu::count();
        let found = DeviceChoice::Auto.open(1, Some(1 << 20)).unwrap();
        let expected = if gpus == 0 { "host".to_string() } else { format!("cuda:{}", 1 % gpus) };
        assert_eq!((found.name(), found.budget().limit()), (expected.as_str(), 1 << 20));
        assert!(matches!(DeviceChoice::Cuda(Some(gpus)).open(0, None), Err(Error::Device(_))));
        assert_eq!(DeviceChoice::Host.open(0, None).unwrap().budget().limit(), u64::MAX);
    }
}
