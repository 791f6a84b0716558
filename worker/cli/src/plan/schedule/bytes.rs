//! Bytes of a step: its pulls and pushes, and the load of each link.

use super::{super::device::Stage, Run};

/// Bytes of a step on each link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Traffic {
    /// From a GPU to all servers.
    pub(crate) push: f64,
    /// From all servers to a GPU.
    pub(crate) pull: f64,
    /// From all GPUs to a server, and back.
    pub(crate) server_in: f64,
    pub(crate) server_out: f64,
    /// From a GPU to the other GPUs, and as much back.
    pub(crate) fabric: f64,
    /// From a GPU to its host, and back.
    pub(crate) activations: f64,
}

impl Run {
    /// Returns the traffic of a step, independent of its time.
    pub(crate) fn traffic(&self) -> Traffic {
        let (mut pushed, mut pulled) = (0.0, 0.0);
        for (index, unit) in self.units.iter().enumerate() {
            let trained = unit.elements * unit.trained;
            pushed += f64::from(self.micro_steps) * trained;
            pulled += match self.stage {
                Stage::Two => trained,
                Stage::Three => {
                    let forward =
                        (0..self.micro_steps).filter(|&at| self.pulls_for_forward(at, index)).count();
                    let backward = if self.pulls_for_backward(index) { self.micro_steps as usize } else { 0 };
                    unit.elements * (forward + backward) as f64
                }
            };
        }
        let others = if self.sliced { (self.gpus - 1.0) / self.gpus } else { 0.0 };
        let of_server = self.gpus / self.servers;
        let (push, pull) = (self.rank_bytes(pushed), self.rank_bytes(pulled));
        Traffic {
            push,
            pull,
            server_in: push * of_server,
            server_out: pull * of_server,
            fabric: (pushed + pulled) * self.width * others,
            activations: self.activations * f64::from(self.micro_steps),
        }
    }
}
