//! Device memory of the 16-bit weights: whole versions (ZeRO stage 2), or a layer at a time (stage 3).

use std::{ops::Range, sync::Arc};

use longshore_proto::{Dtype, Layout, Version};
use longshore_worker::{
    device::{Buffer, Device},
    error::Result,
    pull::Feed,
};

use super::{
    gpt::{BoxError, Gpt},
    memory::largest_layer,
    staging::Staging,
};

/// Stage 2: the versions that steps compute with. One is in use, and in a delayed job another one arrives.
pub struct WholeImages {
    pub(super) staging: Staging,
    dtype: Dtype,
    slots: Vec<Slot>,
}

struct Slot {
    buffer: Buffer,
    /// The version, and whether it was amended as it was read: these weights have other bits than the version itself.
    version: Option<(Version, bool)>,
    /// Which layers of that version are there.
    layers: Vec<bool>,
}

impl WholeImages {
    /// # Errors
    /// `Shortage` when the device's budget has no room for 1 + `delay` images.
    pub fn allocate(
        device: Arc<dyn Device>,
        layout: &Layout,
        dtype: Dtype,
        delay: u32,
    ) -> Result<WholeImages> {
        let bytes = layout.elements() * dtype.bytes();
        let slot = |_| {
            let buffer = device.allocate("16-bit weights", bytes)?;
            Ok(Slot { buffer, version: None, layers: Vec::new() })
        };
        let slots = (0..=delay).map(slot).collect::<Result<_>>()?;
        Ok(WholeImages { staging: Staging::new(device), dtype, slots })
    }

    /// Hands a layer's bytes to `read`, after copying them in from the feed where they are not there yet.
    pub(super) fn layer<R>(
        &mut self,
        feed: &Feed,
        stage: usize,
        range: Range<u64>,
        read: impl FnOnce(&[u8]) -> Result<R, BoxError>,
    ) -> Result<R, BoxError> {
        let (start, bytes) =
            (range.start * self.dtype.bytes(), (range.end - range.start) * self.dtype.bytes());
        let slot = Self::slot(&mut self.slots, (feed.version(), feed.amends()));
        if slot.layers.len() <= stage {
            slot.layers.resize(stage + 1, false);
        }
        if !slot.layers[stage] {
            self.staging.copy_in(&slot.buffer, start, bytes, |host| Ok(feed.read_raw(range, host)?))?;
            slot.layers[stage] = true;
        }
        self.staging.copy_out(&slot.buffer, start, bytes, read)
    }

    /// The slot of a version. The oldest version makes room for a new one.
    fn slot(slots: &mut [Slot], version: (Version, bool)) -> &mut Slot {
        let held = slots.iter().position(|slot| slot.version == Some(version));
        let index = held.unwrap_or_else(|| {
            let oldest = (0..slots.len()).min_by_key(|&index| slots[index].version).unwrap_or(0);
            slots[oldest].version = Some(version);
            slots[oldest].layers.clear();
            oldest
        });
        &mut slots[index]
    }
}

/// Stage 3: room for the layer in use and for the one being prefetched.
pub struct LayerImages {
    pub(super) staging: Staging,
    spare: Vec<Buffer>,
    bytes: u64,
}

impl LayerImages {
    /// # Errors
    /// `Shortage` when the device's budget has no room for two layers.
    pub fn allocate(
        device: Arc<dyn Device>,
        model: &Gpt,
        layout: &Layout,
        dtype: Dtype,
    ) -> Result<LayerImages> {
        let bytes = largest_layer(model, layout) * dtype.bytes();
        let buffer = |_| device.allocate("16-bit weights of a layer", bytes);
        let spare = (0..2).map(buffer).collect::<Result<_>>()?;
        Ok(LayerImages { staging: Staging::new(device), spare, bytes })
    }

    /// A buffer for a layer, which is to be given back.
    pub(super) fn take(&mut self) -> Result<Buffer> {
        match self.spare.pop() {
            Some(buffer) => Ok(buffer),
            None => self.staging.device().allocate("16-bit weights of a layer", self.bytes),
        }
    }

    pub(super) fn give_back(&mut self, buffer: Buffer) {
        self.spare.push(buffer);
    }
}
