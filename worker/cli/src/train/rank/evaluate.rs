//! A run's work between steps and at the end: validation and checkpoints.

use longshore_proto::Version;
use longshore_worker::pipeline::Pipeline;

use super::{DeviceBuffers, Run, unwrap_library};
use crate::train::{
    ImageWeights, gpt,
    keep::Keeper,
    report::{Ending, Report},
};

impl Run<'_> {
    pub(super) fn after_step(
        &self,
        pipeline: &mut Pipeline,
        memory: &mut DeviceBuffers,
        keeper: &mut Keeper<'_>,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let step = pipeline.last_step().0;
        let due = |every: u64| every > 0 && step.is_multiple_of(every) && step < self.settings.flags.steps;
        if due(self.settings.flags.eval_every) {
            let version = pipeline.drain()?;
            report.decided(pipeline.outcomes());
            self.evaluate_at(pipeline, version, memory, report)?;
        }
        if self.rank == 0 && keeper.is_due(step) {
            pipeline.drain()?;
            keeper.checkpoint(pipeline.session(), step, report)?;
        }
        Ok(())
    }

    pub(super) fn evaluate_at(
        &self,
        pipeline: &Pipeline,
        version: Version,
        memory: &mut DeviceBuffers,
        report: &mut Report,
    ) -> anyhow::Result<Option<f32>> {
        if self.rank != 0 || self.validation.is_empty() {
            return Ok(None);
        }
        let mut weights = self.weights_of(pipeline, version, memory)?;
        let loss = gpt::evaluate(&self.model, &mut weights, &self.validation).map_err(unwrap_library)?;
        report.validation(version.0, loss);
        Ok(Some(loss))
    }

    fn weights_of<'s>(
        &'s self,
        pipeline: &Pipeline,
        version: Version,
        memory: &'s mut DeviceBuffers,
    ) -> anyhow::Result<ImageWeights<'s>> {
        let whole = 0..self.layout.elements();
        let order = std::slice::from_ref(&whole);
        let feed = pipeline.session().pull(version, order)?;
        memory.images.forget();
        Ok(self.weights(feed, &mut memory.images))
    }

    pub(super) fn end(
        &self,
        pipeline: &Pipeline,
        version: Version,
        memory: &mut DeviceBuffers,
        (first_loss, host_peak): (Option<f32>, u64),
    ) -> anyhow::Result<Ending> {
        let session = pipeline.session();
        let mut weights = self.weights_of(pipeline, version, memory)?;
        let loss = gpt::evaluate(&self.model, &mut weights, &self.validation);
        Ok(Ending {
            first_loss,
            host_peak,
            version: version.0,
            state_hash: session.state_hash()?.hash,
            validation_loss: loss.map_err(unwrap_library)?,
            device: self.device.name().to_string(),
            device_peak: self.device.budget().peak(),
            server_bytes: session.describe()?.iter().map(|server| server.memory_bytes).sum(),
        })
    }
}
