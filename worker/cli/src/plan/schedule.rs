//! The schedule of steps: who computes, sends and updates when, on links and servers of given speed.
//!
//! All ranks do the same at the same time, so one rank is followed, and what ranks share is slower by their number. Each
//! resource does one thing at a time, in the order of the protocol: gradients leave last layer first, shards are updated in forward order
//! behind the decision, and weights follow their update. So a run of 512 GPUs takes no longer to simulate than one of two.

use super::device::Stage;

/// Speeds, in bytes and operations a second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hardware {
    pub(crate) gpu_flops: f64,
    /// A GPU's way to the servers, in each direction.
    pub(crate) link: f64,
    /// A server's way to all GPUs, in each direction.
    pub(crate) server_link: f64,
    /// What a server's memory moves in an update.
    pub(crate) server_memory: f64,
    /// What a server's drives read and write together.
    pub(crate) drives: f64,
    /// A GPU's way to the other GPUs.
    pub(crate) fabric: f64,
    pub(crate) round_trip_s: f64,
}

/// The parameters that are acquired together, and how long a rank computes with them in a micro-step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unit {
    pub(crate) elements: f64,
    pub(crate) forward_s: f64,
    pub(crate) backward_s: f64,
}

#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) units: Vec<Unit>,
    pub(crate) gpus: f64,
    pub(crate) servers: f64,
    pub(crate) stage: Stage,
    pub(crate) delayed: bool,
    /// Each rank pushes and pulls its slice of each unit, and ranks exchange slices.
    pub(crate) sliced: bool,
    pub(crate) micro_steps: u32,
    /// Bytes of an element on the wire.
    pub(crate) width: f64,
    /// Bytes of memory traffic of an element's update, and what of it goes to drives and comes from them.
    pub(crate) update_bytes: f64,
    pub(crate) drive_bytes: f64,
}

/// What a step may wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Binding {
    Gpu,
    Push,
    Pull,
    Fabric,
    ServerMemory,
    Drives,
}

impl Binding {
    pub(crate) fn says(self) -> &'static str {
        match self {
            Binding::Gpu => "the GPU",
            Binding::Push => "the links, for gradients",
            Binding::Pull => "the links, for weights",
            Binding::Fabric => "the links between GPUs",
            Binding::ServerMemory => "the servers' memory",
            Binding::Drives => "the servers' drives",
        }
    }
}

/// One step of a run that has gone on for a while.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) wall_s: f64,
    pub(crate) compute_s: f64,
    /// What is in use for the longest part of the step, and for how long.
    pub(crate) binding: Binding,
    pub(crate) binding_s: f64,
}

impl Step {
    pub(crate) fn exposed_s(&self) -> f64 {
        (self.wall_s - self.compute_s).max(0.0)
    }
}

/// How many steps go by before one counts. A delayed step depends on the two before it, so that the fourth is like all
/// that follow.
const WARM_STEPS: usize = 4;
/// How many units of stage 3 are on the device: the one in use and the next.
const RESIDENT: usize = 2;

/// Something that does one thing at a time. What is asked of it first goes first, and what is ready earlier fills the
/// gaps.
#[derive(Default)]
struct Line {
    /// When it is in use, in order, without overlap.
    used: Vec<(f64, f64)>,
    busy_s: f64,
}

impl Line {
    /// Does what takes so long, once it is ready. Returns the time when it is done.
    fn take(&mut self, ready_at: f64, seconds: f64) -> f64 {
        if seconds <= 0.0 {
            return ready_at;
        }
        self.busy_s += seconds;
        let (mut at, mut left) = (ready_at, seconds);
        let first = self.used.partition_point(|&(_, end)| end < at);
        let mut after = first;
        while let Some(&(start, end)) = self.used.get(after) {
            let gap = (start - at).max(0.0);
            if gap >= left {
                break;
            }
            left -= gap;
            at = at.max(end);
            after += 1;
        }
        let done_at = at + left;
        // The gaps between these uses are filled now, so that all of them are one.
        let began_at = self.used[first..after].first().map_or(ready_at, |&(start, _)| start.min(ready_at));
        self.used.splice(first..after, [(began_at, done_at)]);
        done_at
    }
}

#[derive(Default)]
struct Lines {
    gpu: Line,
    push: Line,
    pull: Line,
    fabric: Line,
    memory: Line,
    drives: Line,
}

impl Lines {
    fn busy(&self) -> [(Binding, f64); 6] {
        [
            (Binding::Gpu, self.gpu.busy_s),
            (Binding::Push, self.push.busy_s),
            (Binding::Pull, self.pull.busy_s),
            (Binding::Fabric, self.fabric.busy_s),
            (Binding::ServerMemory, self.memory.busy_s),
            (Binding::Drives, self.drives.busy_s),
        ]
    }
}

/// A run in the middle of its steps.
struct Simulation<'a> {
    run: &'a Run,
    hardware: &'a Hardware,
    lines: Lines,
    /// By unit, when the version after the last step and the one before it can be read: on the servers at stage 3, on the
    /// device at stage 2.
    newest: Vec<f64>,
    older: Vec<f64>,
    /// When each use of a unit ended, and the last of them.
    uses: Vec<f64>,
    computed_at: f64,
}

impl Run {
    /// One step of many.
    pub(crate) fn step(&self, hardware: &Hardware) -> Step {
        let start = vec![0.0; self.units.len()];
        let mut simulation = Simulation {
            run: self,
            hardware,
            lines: Lines::default(),
            newest: start.clone(),
            older: start,
            uses: Vec::new(),
            computed_at: 0.0,
        };
        (0..WARM_STEPS).for_each(|_| simulation.step());
        let (before, busy_before) = (simulation.computed_at, simulation.lines.busy());
        simulation.step();
        let busy = simulation.lines.busy().into_iter().zip(busy_before);
        let in_step = busy.map(|((binding, after), (_, before))| (binding, after - before));
        let (binding, binding_s) =
            in_step.max_by(|one, other| one.1.total_cmp(&other.1)).unwrap_or((Binding::Gpu, 0.0));
        let compute: f64 = self.units.iter().map(|unit| unit.forward_s + unit.backward_s).sum();
        Step {
            wall_s: simulation.computed_at - before,
            compute_s: compute * f64::from(self.micro_steps),
            binding,
            binding_s,
        }
    }

    /// The bytes of a unit that one rank exchanges with the servers in one direction.
    fn rank_bytes(&self, unit: Unit) -> f64 {
        unit.elements * self.width / if self.sliced { self.gpus } else { 1.0 }
    }
}

impl Simulation<'_> {
    /// How long a unit is on the links between all ranks and all servers.
    fn transfer_s(&self, unit: Unit) -> f64 {
        let bytes = self.run.rank_bytes(unit);
        let of_servers = bytes * self.run.gpus / (self.run.servers * self.hardware.server_link);
        of_servers.max(bytes / self.hardware.link)
    }

    /// How long ranks exchange the slices of a unit.
    fn exchange_s(&self, unit: Unit) -> f64 {
        if !self.run.sliced {
            return 0.0;
        }
        unit.elements * self.run.width * (self.run.gpus - 1.0) / self.run.gpus / self.hardware.fabric
    }

    fn pull(&mut self, unit: Unit, ready_at: f64) -> f64 {
        let arrived = self.lines.pull.take(ready_at, self.transfer_s(unit));
        self.lines.fabric.take(arrived, self.exchange_s(unit))
    }

    fn step(&mut self) {
        let units = self.run.units.len();
        let mut received_at = 0.0f64;
        for micro_step in 0..self.run.micro_steps {
            for unit in 0..units {
                self.compute(unit, self.run.units[unit].forward_s, true);
            }
            for unit in (0..units).rev() {
                // Backward begins with the unit that forward ended with.
                let done = self.compute(unit, self.run.units[unit].backward_s, unit + 1 < units);
                received_at = received_at.max(self.push(self.run.units[unit], done, micro_step));
            }
        }
        self.update(received_at);
    }

    /// Uses a unit's weights, and returns when that is done.
    fn compute(&mut self, unit: usize, seconds: f64, is_pulled: bool) -> f64 {
        let readable = if self.run.delayed { self.older[unit] } else { self.newest[unit] };
        let ready = match self.run.stage {
            Stage::Three if is_pulled => {
                let room = self.uses.len().checked_sub(RESIDENT).map_or(0.0, |before| self.uses[before]);
                self.pull(self.run.units[unit], readable.max(room))
            }
            Stage::Two | Stage::Three => readable,
        };
        // A GPU computes in the model's order, so that nothing fills its gaps.
        self.computed_at = self.lines.gpu.take(ready.max(self.computed_at), seconds);
        self.uses.push(self.computed_at);
        self.computed_at
    }

    /// Sends a unit's gradients, and returns when the servers have them, added up over ranks.
    fn push(&mut self, unit: Unit, made_at: f64, micro_step: u32) -> f64 {
        let reduced = self.lines.fabric.take(made_at, self.exchange_s(unit));
        let sent = self.lines.push.take(reduced, self.transfer_s(unit));
        let contributions = if self.run.sliced { 1.0 } else { self.run.gpus };
        // A lone contribution is written as it comes. Several are read again and added up in fp32.
        let is_lone = contributions == 1.0 && self.run.micro_steps == 1;
        let sums = if is_lone {
            0.0
        } else {
            contributions * self.run.width + if micro_step == 0 { 4.0 } else { 8.0 }
        };
        let bytes = unit.elements * (contributions * self.run.width + sums);
        self.lines.memory.take(sent, bytes / (self.run.servers * self.hardware.server_memory))
    }

    fn update(&mut self, received_at: f64) {
        // Rank 0 reads the gradient statistics, then sends the commit.
        let decided_at = received_at + 2.0 * self.hardware.round_trip_s;
        std::mem::swap(&mut self.newest, &mut self.older);
        for index in 0..self.run.units.len() {
            let unit = self.run.units[index];
            let of_servers = unit.elements / self.run.servers;
            let memory = of_servers * self.run.update_bytes / self.hardware.server_memory;
            let drives = of_servers * self.run.drive_bytes / self.hardware.drives;
            let updated =
                self.lines.memory.take(decided_at, memory).max(self.lines.drives.take(decided_at, drives));
            self.newest[index] = match self.run.stage {
                Stage::Two => self.pull(unit, updated),
                Stage::Three => updated,
            };
        }
    }
}

/// The fewest servers with which a step is at most a hundredth longer than with as many as one likes, up to `most`, and
/// that step.
pub(crate) fn enough_servers(run: &Run, hardware: &Hardware, most: u32) -> (u32, Step) {
    let with = |servers: u32| Run { servers: f64::from(servers), ..run.clone() }.step(hardware);
    let best = with(most).wall_s;
    // More servers never make a step longer.
    let (mut low, mut high) = (1, most);
    while low < high {
        let middle = low.midpoint(high);
        if with(middle).wall_s <= best * 1.01 { high = middle } else { low = middle + 1 }
    }
    (low, with(low))
}

#[cfg(test)]
mod tests;
