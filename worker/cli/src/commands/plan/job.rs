//! The planned job: its model, formats, contributors and storage.

use anyhow::{Context, ensure};
use longshore_engine::{
    admission::Need,
    tier::{self, Storage},
};
use longshore_proto::{
    Formats, JobName, JobSpec, Param, Partition, Placement, Rank, ServerId,
    limits::{MAX_ELEMENTS, MAX_SHARDS},
};

use super::{Args, gpus};
use crate::{
    output::wrong_use,
    plan::{HardwareArgs, Model, Tensor, Transformer},
    train::{
        gpt::{Gpt, VOCABULARY},
        preset,
    },
};

impl Args {
    pub(super) fn formats(&self) -> Formats {
        Formats { state: self.state, master: self.master, seed: 0 }
    }

    pub(super) fn frozen(&self) -> u64 {
        self.frozen.unwrap_or(0)
    }

    pub(super) fn model(&self) -> anyhow::Result<Model> {
        if let Some(path) = &self.model {
            return crate::plan::read(path);
        }
        if let Some(name) = &self.preset {
            let config = preset(name).map_err(wrong_use)?;
            let shapes = Gpt::new(config)?
                .params()
                .iter()
                .map(|param| {
                    let shape: Vec<u64> = param.shape.iter().map(|&size| size as u64).collect();
                    Tensor::new(param.name.clone(), &shape)
                })
                .collect();
            let (layers, width) = (config.layers as u64, config.width as u64);
            let transformer = Transformer { layers, width, vocabulary: VOCABULARY as u64, experts: (1, 1) };
            return Ok(Model { tensors: shapes, transformer: Some(transformer) });
        }
        Ok(Model::of_about(self.params.context("--params, --preset or --model is needed")?, gpus::VOCABULARY))
    }

    pub(super) fn spec(&self, model: &Model) -> anyhow::Result<JobSpec> {
        // The number of --params counts, not that of the nearest transformer.
        self.spec_of(self.params.unwrap_or_else(|| model.elements()))
    }

    fn spec_of(&self, elements: u64) -> anyhow::Result<JobSpec> {
        // Each parameter here is one shard long, since the division of a model into tensors does not change the
        // result.
        let cut = self.shard_elements;
        // The limit is checked before the list of parameters takes memory.
        ensure!(
            elements.div_ceil(cut) <= MAX_SHARDS,
            "{elements} parameters in shards of {cut} are more than {MAX_SHARDS} shards: give a larger --shard-elements"
        );
        ensure!(
            self.frozen() < elements,
            "--frozen is {}, but must be below {elements}, the parameters: at least one is trained",
            self.frozen()
        );
        let cuts =
            |elements: u64| (0..elements.div_ceil(cut)).map(move |index| (elements - index * cut).min(cut));
        let trained: Vec<u64> = cuts(elements - self.frozen()).collect();
        let partitions = self.partitions(trained.len() as u64)?;
        let params = trained.into_iter().chain(cuts(self.frozen())).enumerate();
        let params =
            params.map(|(index, size)| Param { name: format!("p{index}"), shape: vec![size], group: 0 });
        Ok(JobSpec {
            gradient_dtype: self.dtype,
            image_dtype: self.dtype,
            world_size: self.world_size,
            micro_steps: self.micro_steps,
            max_delay: self.delay,
            shard_elements: cut,
            tier: self.tier,
            formats: self.formats(),
            partitions,
            ..JobSpec::new(JobName::parse("job", "plan")?, params.collect())
        })
    }

    /// Returns the most parameters, in whole shards, that fit in --memory and --nvme of a server. None if neither
    /// is given, or if some are frozen, since nothing says how the frozen part grows.
    pub(super) fn most_parameters(&self) -> anyhow::Result<Option<u64>> {
        let HardwareArgs { memory, nvme, .. } = *self.hardware();
        if (memory.is_none() && nvme.is_none()) || self.frozen() > 0 {
            return Ok(None);
        }
        // Returns true if `each` shards fit on each server. All servers own the same number, so server 0 stands for
        // all.
        let fits = |each: u64| -> anyhow::Result<bool> {
            let spec = self.spec_of(each * u64::from(self.servers) * self.shard_elements)?;
            let layout = spec.validate()?;
            let servers = (0..self.servers).map(|server| server.to_string()).collect();
            let owned = Placement::striped(servers, layout.shards()).owned(ServerId(0));
            let need = Need::of(&spec, &layout, &owned, &self.storage());
            Ok(memory.is_none_or(|has| need.total() <= has.0) && nvme.is_none_or(|has| need.disk <= has.0))
        };
        let limit = MAX_SHARDS.min(MAX_ELEMENTS / self.shard_elements) / u64::from(self.servers);
        // Ranks that exchange slices have at least one shard each.
        let least = if self.is_sliced() { self.world_size.div_ceil(self.servers).into() } else { 1 };
        if limit < least || !fits(least)? {
            return Ok(Some(0));
        }
        let (mut low, mut high) = (least, (2 * least).min(limit));
        while high < limit && fits(high)? {
            (low, high) = (high, (2 * high).min(limit));
        }
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle)? { low = middle } else { high = middle - 1 }
        }
        Ok(Some(low * u64::from(self.servers) * self.shard_elements))
    }

    /// Returns true if ranks exchange slices of weights and gradients among themselves, so that each element has
    /// one contributor.
    pub(super) fn is_sliced(&self) -> bool {
        self.world_size > 1 && self.hardware().has_fabric()
    }

    /// Returns the partitions of `trained` tensors, and of the frozen tensors behind them. If ranks exchange slices,
    /// each contributes to a part of the trained tensors.
    fn partitions(&self, trained: u64) -> anyhow::Result<Vec<Partition>> {
        let ranks = u64::from(self.world_size);
        let mut partitions = Vec::new();
        if self.is_sliced() {
            ensure!(
                trained >= ranks,
                "{ranks} ranks exchange slices of {trained} shards, but each has one at least: give smaller --shard-elements"
            );
            let of_rank = |rank: u64| Partition {
                first: (rank * trained / ranks) as u32,
                ranks: vec![Rank(rank as u32)],
            };
            partitions.extend((0..ranks).map(of_rank));
        } else if self.frozen() > 0 {
            partitions.push(Partition::whole(self.world_size));
        }
        if self.frozen() > 0 {
            partitions.push(Partition::frozen(trained as u32));
        }
        Ok(partitions)
    }

    pub(super) fn storage(&self) -> Storage {
        Storage {
            // Only the number of folders counts.
            dirs: (0..self.state_dirs).map(|index| index.to_string().into()).collect(),
            resident_bytes: self.resident.map_or(0, |size| size.0),
            buffers: self.storage_buffers,
            spill: self.spill,
            ..tier::Storage::default()
        }
    }
}
