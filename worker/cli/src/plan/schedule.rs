//! Simulates steps on links and servers of given speed: compute, sends and updates.
//!
//! All ranks do the same at the same time, so one rank is simulated. Shared resources are slower by the number of
//! ranks. A run of 512 GPUs takes no longer to simulate than one of two. Servers are simulated one by one, since a
//! shard is as fast as the server that owns it.
//!
//! Each resource does one thing at a time, in the order of the protocol. Gradients leave last layer first. Shards
//! are updated in forward order after the decision. Weights follow their update.

mod resources;

use longshore_proto::JobSpec;

use self::resources::{Line, Part, deal, groups};
use super::{
    device::Stage,
    traffic::{DriveTraffic, update_bytes},
};

/// Speeds, in bytes and operations a second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hardware {
    pub(crate) gpu_flops: f64,
    /// A GPU's link to the servers, in each direction.
    pub(crate) link: f64,
    /// A server's link to all GPUs, in each direction.
    pub(crate) server_link: f64,
    /// Bytes a second that a server's memory moves in updates.
    pub(crate) server_memory: f64,
    /// Bytes a second that a server's drives read and write together.
    pub(crate) drives: f64,
    /// A GPU's link to the other GPUs.
    pub(crate) fabric: f64,
    pub(crate) round_trip_s: f64,
}

/// The parameters acquired together, and a rank's compute time with them in a micro-step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unit {
    pub(crate) elements: f64,
    /// Trained part of the parameters. The rest has no gradient and no update.
    pub(crate) trained: f64,
    pub(crate) forward_s: f64,
    pub(crate) backward_s: f64,
}

#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) units: Vec<Unit>,
    pub(crate) gpus: f64,
    pub(crate) servers: f64,
    pub(crate) shard: f64,
    pub(crate) stage: Stage,
    /// Elements for which the device has room at stage 3.
    pub(crate) room: f64,
    /// Bytes of activations that each GPU moves to its host in forward, and back in backward, in a micro-step.
    pub(crate) activations: f64,
    pub(crate) delayed: bool,
    /// True if each rank pushes and pulls its slice of each unit, and ranks exchange slices.
    pub(crate) sliced: bool,
    pub(crate) micro_steps: u32,
    /// Bytes of an element on the wire.
    pub(crate) width: f64,
    /// Bytes of memory traffic of an element's update.
    pub(crate) update_bytes: f64,
    pub(crate) drives: DriveTraffic,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Traffic {
    pub(crate) push: f64,
    pub(crate) pull: f64,
    /// Bytes from all GPUs to a server (`server_in`), and back (`server_out`).
    pub(crate) server_in: f64,
    pub(crate) server_out: f64,
    /// Bytes from a GPU to the other GPUs. As many come back.
    pub(crate) fabric: f64,
    /// Bytes from a GPU to its host. As many come back.
    pub(crate) activations: f64,
}

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

#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) wall_s: f64,
    pub(crate) compute_s: f64,
    /// The resource in use for the longest part of the step, and the length of that part.
    pub(crate) binding: Binding,
    pub(crate) binding_s: f64,
}

impl Step {
    pub(crate) fn exposed_s(&self) -> f64 {
        (self.wall_s - self.compute_s).max(0.0)
    }
}

/// Number of steps before the step that counts. A delayed step depends on the two before, so from the fourth on all
/// steps are alike.
const WARM_STEPS: usize = 4;
#[derive(Default)]
struct OfRank {
    gpu: Line,
    push: Line,
    pull: Line,
    fabric: Line,
}

#[derive(Clone, Default)]
struct OfGroup {
    push: Line,
    pull: Line,
    memory: Line,
    drives: Line,
}

struct Simulation<'a> {
    run: &'a Run,
    hardware: &'a Hardware,
    rank: OfRank,
    groups: Vec<OfGroup>,
    parts: Vec<Vec<Part>>,
    /// For each unit, the time from which a version is readable. Stage 3 reads on the servers, stage 2 on the device.
    /// `newest` is the version of the last step, `older` the version before.
    newest: Vec<f64>,
    older: Vec<f64>,
    /// For each use of a unit: the unit in `used`, the end of the use in `uses`. `computed_at` is the end of the last
    /// use.
    used: Vec<usize>,
    uses: Vec<f64>,
    computed_at: f64,
}

impl Run {
    /// Returns the steps of a job at stage 2, without activations on the host.
    pub(crate) fn of(
        spec: &JobSpec,
        units: Vec<Unit>,
        servers: f64,
        sliced: bool,
        drives: DriveTraffic,
    ) -> Run {
        Run {
            units,
            gpus: spec.world_size.into(),
            servers,
            shard: spec.shard_elements as f64,
            stage: Stage::Two,
            room: f64::INFINITY,
            activations: 0.0,
            delayed: spec.max_delay > 0,
            sliced,
            micro_steps: spec.micro_steps,
            width: spec.gradient_dtype.bytes() as f64,
            update_bytes: update_bytes(spec, sliced),
            drives,
        }
    }

    pub(crate) fn step(&self, hardware: &Hardware) -> Step {
        let mut simulation = Simulation::of(self, hardware);
        (0..WARM_STEPS).for_each(|_| simulation.step());
        let before = simulation.computed_at;
        let in_step = simulation.busy_step().into_iter();
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

    /// Bytes that one rank exchanges with the servers for `elements` elements, in one direction.
    fn rank_bytes(&self, elements: f64) -> f64 {
        elements * self.width / if self.sliced { self.gpus } else { 1.0 }
    }
}

/// Bytes of a step, and the units that a device keeps at stage 3, as `longshore.shard` does. As far as there is room, the
/// last units of forward stay for backward. The last units of backward stay for the next micro-step.
impl Run {
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

    pub(crate) fn staying(&self) -> usize {
        self.fitting(self.units.iter().rev().map(|unit| unit.elements))
    }

    /// Returns how many units of the given sizes fit, from the first one on.
    fn fitting(&self, elements: impl Iterator<Item = f64>) -> usize {
        let sums = elements.scan(0.0, |sum, elements| {
            *sum += elements;
            Some(*sum)
        });
        sums.take_while(|&sum| sum <= self.room).count()
    }

    /// Returns true if a unit is pulled before its forward pass. Each step reads another version, so nothing stays
    /// from one step to the next.
    fn pulls_for_forward(&self, micro_step: u32, unit: usize) -> bool {
        micro_step == 0 || unit >= self.fitting(self.units.iter().map(|unit| unit.elements))
    }

    fn pulls_for_backward(&self, unit: usize) -> bool {
        unit + self.staying() < self.units.len()
    }

    /// Returns the use that must end before a unit has room. None if no use is in the way.
    fn makes_room(&self, used: &[usize], unit: usize) -> Option<usize> {
        let mut sum = self.units[unit].elements;
        used.iter().rposition(|&before| {
            sum += self.units[before].elements;
            sum > self.room
        })
    }
}

impl<'a> Simulation<'a> {
    fn of(run: &'a Run, hardware: &'a Hardware) -> Simulation<'a> {
        let start = vec![0.0; run.units.len()];
        let groups = groups(run.servers);
        Simulation {
            run,
            hardware,
            rank: OfRank::default(),
            groups: vec![OfGroup::default(); groups],
            parts: deal(run.units.iter().map(|unit| unit.elements), run.shard, groups),
            newest: start.clone(),
            older: start,
            used: Vec::new(),
            uses: Vec::new(),
            computed_at: 0.0,
        }
    }

    fn busy_step(&mut self) -> [(Binding, f64); 6] {
        let before = self.busy();
        self.step();
        let mut busy = self.busy();
        busy.iter_mut().zip(before).for_each(|((_, seconds), (_, before))| *seconds -= before);
        busy
    }

    /// Returns the time that each resource has been in use. The busiest server counts.
    fn busy(&self) -> [(Binding, f64); 6] {
        let most = |line: fn(&OfGroup) -> &Line| {
            self.groups.iter().map(|group| line(group).busy_s).fold(0.0, f64::max)
        };
        [
            (Binding::Gpu, self.rank.gpu.busy_s),
            (Binding::Push, self.rank.push.busy_s.max(most(|group| &group.push))),
            (Binding::Pull, self.rank.pull.busy_s.max(most(|group| &group.pull))),
            (Binding::Fabric, self.rank.fabric.busy_s),
            (Binding::ServerMemory, most(|group| &group.memory)),
            (Binding::Drives, most(|group| &group.drives)),
        ]
    }

    fn of_group(&self, of_server: f64) -> f64 {
        of_server * self.run.servers / self.groups.len() as f64
    }

    /// Returns two times of a transfer to or from all ranks. The first is for the part over its group's link. The
    /// second is for the part's largest shard over one server's link.
    fn transfer_s(&self, part: &Part, share: f64) -> (f64, f64) {
        let all_ranks = |elements: f64| self.run.rank_bytes(elements * share) * self.run.gpus;
        (
            all_ranks(part.elements) / self.of_group(self.hardware.server_link),
            all_ranks(part.longest) / self.hardware.server_link,
        )
    }

    /// Returns the time in which ranks exchange the slices of this many elements.
    fn exchange_s(&self, elements: f64) -> f64 {
        if !self.run.sliced {
            return 0.0;
        }
        elements * self.run.width * (self.run.gpus - 1.0) / self.run.gpus / self.hardware.fabric
    }

    /// Pulls a share of a unit to the rank. `readable` returns the time from which on each part can be read.
    /// Returns the time of arrival.
    fn pull(&mut self, unit: usize, share: f64, readable: impl Fn(usize) -> f64) -> f64 {
        let elements = self.run.units[unit].elements * share;
        let first = (0..self.parts[unit].len()).map(&readable).fold(f64::INFINITY, f64::min);
        let on_link = self.run.rank_bytes(elements) / self.hardware.link;
        let mut arrived = self.rank.pull.take(first, on_link);
        // A single read serves all ranks, since they ask for the same data soon after each other.
        let read = share * self.read_bytes(unit);
        for index in 0..self.parts[unit].len() {
            let part = self.parts[unit][index];
            let (seconds, least) = self.transfer_s(&part, share);
            let ready = readable(index);
            let drives = part.elements * read / self.of_group(self.hardware.drives);
            let least = least.max(part.longest * read / self.hardware.drives);
            let group = &mut self.groups[part.group];
            let read_at = group.drives.take(ready, drives);
            arrived = arrived.max(group.pull.take(ready, seconds)).max(read_at).max(ready + least);
        }
        self.rank.fabric.take(arrived, self.exchange_s(elements))
    }

    /// Returns the bytes that a pull reads of the drives per element of a unit. At stage 2 pulls follow the
    /// update, and find its images in DRAM.
    fn read_bytes(&self, unit: usize) -> f64 {
        let (trained, drives) = (self.run.units[unit].trained, self.run.drives);
        match self.run.stage {
            Stage::Two => 0.0,
            Stage::Three => trained * drives.pull + (1.0 - trained) * drives.frozen_pull,
        }
    }

    fn step(&mut self) {
        let units = self.run.units.len();
        let mut received_at = 0.0f64;
        for micro_step in 0..self.run.micro_steps {
            // Times at which each unit's activations have left. The device has room for the activations of two units.
            let mut left = Vec::with_capacity(units);
            for unit in 0..units {
                let is_pulled = self.run.pulls_for_forward(micro_step, unit);
                let room = unit.checked_sub(2).map_or(0.0, |before| left[before]);
                let done = self.compute((unit, self.run.units[unit].forward_s), is_pulled, room);
                left.push(self.rank.push.take(done, self.activations_s(unit)));
            }
            for unit in (0..units).rev() {
                let is_pulled = self.run.pulls_for_backward(unit);
                let before = self.uses.len().checked_sub(2).map_or(0.0, |before| self.uses[before]);
                let back = self.rank.pull.take(before.max(left[unit]), self.activations_s(unit));
                let done = self.compute((unit, self.run.units[unit].backward_s), is_pulled, back);
                received_at = received_at.max(self.push(unit, done, micro_step));
            }
        }
        self.update(received_at);
    }

    /// Returns the transfer time of a unit's activations between the GPU and its host. The link to the servers begins with
    /// this link.
    fn activations_s(&self, unit: usize) -> f64 {
        if self.run.activations <= 0.0 {
            return 0.0;
        }
        let all: f64 = self.run.units.iter().map(|unit| unit.elements).sum();
        self.run.activations * self.run.units[unit].elements / all / self.hardware.link
    }

    /// Computes with a unit's weights for `seconds`, and returns the end. `activations_at` is the time when forward
    /// has room for the unit's activations, or when backward has them back.
    fn compute(&mut self, (unit, seconds): (usize, f64), is_pulled: bool, activations_at: f64) -> f64 {
        let readable = if self.run.delayed { self.older[unit] } else { self.newest[unit] };
        let ready = match self.run.stage {
            Stage::Three if is_pulled => {
                let before = self.run.makes_room(&self.used, unit);
                let ready = readable.max(before.map_or(0.0, |before| self.uses[before]));
                self.pull(unit, 1.0, |_| ready)
            }
            Stage::Two | Stage::Three => readable,
        };
        // A GPU computes in the model's order, so no other work fills its gaps.
        let ready = ready.max(self.computed_at).max(activations_at);
        self.computed_at = self.rank.gpu.take(ready, seconds);
        self.used.push(unit);
        self.uses.push(self.computed_at);
        self.computed_at
    }

    /// Sends a unit's gradients. Returns the time at which servers have their sum over ranks.
    fn push(&mut self, unit: usize, made_at: f64, micro_step: u32) -> f64 {
        let Unit { elements, trained, .. } = self.run.units[unit];
        if trained <= 0.0 {
            return made_at;
        }
        let reduced = self.rank.fabric.take(made_at, self.exchange_s(elements * trained));
        let on_link = self.run.rank_bytes(elements * trained) / self.hardware.link;
        let left_rank = self.rank.push.take(reduced, on_link);
        let contributions = if self.run.sliced { 1.0 } else { self.run.gpus };
        // A single contribution is only written as it arrives. Several contributions are also read again and added up
        // in fp32.
        let is_lone = contributions == 1.0 && self.run.micro_steps == 1;
        let sums = if is_lone {
            0.0
        } else {
            contributions * self.run.width + if micro_step == 0 { 4.0 } else { 8.0 }
        };
        let memory = self.of_group(self.hardware.server_memory);
        let drives = self.of_group(self.hardware.drives);
        let mut received = left_rank;
        for index in 0..self.parts[unit].len() {
            let part = self.parts[unit][index];
            let (seconds, least) = self.transfer_s(&part, trained);
            let group = &mut self.groups[part.group];
            let sent = group.push.take(reduced, seconds).max(reduced + least).max(left_rank);
            let elements = part.elements * trained;
            let bytes = elements * (contributions * self.run.width + sums);
            // Spilled gradients are written once for all micro-steps together.
            let spilled = elements * self.run.drives.gradients / f64::from(self.run.micro_steps);
            let in_memory = group.memory.take(sent, bytes / memory);
            received = received.max(in_memory.max(group.drives.take(sent, spilled / drives)));
        }
        received
    }

    fn update(&mut self, received_at: f64) {
        // Rank 0 reads the gradient statistics, then sends the commit.
        let decided_at = received_at + 2.0 * self.hardware.round_trip_s;
        let memory = self.of_group(self.hardware.server_memory);
        let drives = self.of_group(self.hardware.drives);
        std::mem::swap(&mut self.newest, &mut self.older);
        for index in 0..self.run.units.len() {
            let trained = self.run.units[index].trained;
            if trained <= 0.0 {
                self.newest[index] = self.older[index];
                continue;
            }
            let mut updated = Vec::with_capacity(self.parts[index].len());
            for part in &self.parts[index] {
                let elements = part.elements * trained;
                let (of_memory, of_drives) = (self.run.update_bytes, self.run.drives.update);
                // A single server, the owner, updates a shard.
                let longest = part.longest * trained;
                let least = (longest * of_memory / self.hardware.server_memory)
                    .max(longest * of_drives / self.hardware.drives);
                let group = &mut self.groups[part.group];
                let in_memory = group.memory.take(decided_at, elements * of_memory / memory);
                let on_drives = group.drives.take(decided_at, elements * of_drives / drives);
                updated.push(in_memory.max(on_drives).max(decided_at + least));
            }
            self.newest[index] = match self.run.stage {
                Stage::Two => self.pull(index, trained, |part| updated[part]),
                Stage::Three => updated.into_iter().fold(0.0, f64::max),
            };
        }
    }
}

/// Returns the fewest servers whose step is at most 1% longer than with `most` servers.
pub(crate) fn enough_servers(run: &Run, hardware: &Hardware, most: u32) -> u32 {
    let wall_s = |servers: u32| Run { servers: f64::from(servers), ..run.clone() }.step(hardware).wall_s;
    let longest = wall_s(most) * 1.01;
    // Twice the servers never make a step longer. A single server more may, if shards are then dealt unevenly. A few
    // servers are tried first: their groups are few, so their simulation takes a fraction of the time.
    let (mut low, mut high) = (1, 1);
    while high < most && wall_s(high) > longest {
        (low, high) = (high + 1, (2 * high).min(most));
    }
    while low < high {
        let middle = low.midpoint(high);
        if wall_s(middle) <= longest { high = middle } else { low = middle + 1 }
    }
    low
}

#[cfg(test)]
mod tests;
