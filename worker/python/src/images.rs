//! Images as they are before this worker amends them: for whoever amends them where the weights are used, on a device.

use std::ops::Range;

use longshore_proto::{Amendment, Dtype, Fault};
use longshore_worker::{Feed, Result};

use crate::{
    memory::HostTensor,
    training::Training,
    weights::{From, Places},
};

/// A parameter's tensor for its image, in the image's type, and one for its rates.
pub(crate) type Target = (HostTensor, HostTensor);

/// Parameters whose images are read together.
pub(crate) struct Images {
    feed: Feed,
    targets: Vec<(Target, Range<u64>)>,
}

impl Images {
    fn new(feed: &Feed, places: &Places, targets: Vec<Target>) -> Result<Images> {
        let of = |target: Target| -> Result<_> {
            if !target.0.is_of(feed.dtype()) || !target.1.is_of(Dtype::F32) {
                let limit = format!("{} for an image, and f32 for its rates", feed.dtype());
                return Err(
                    Fault::invalid("tensor", "another type", limit, "give both as the job has them").into()
                );
            }
            let place = places.of(&target.0)?;
            Ok((target, place))
        };
        let targets = targets.into_iter().map(of).collect::<Result<_>>()?;
        Ok(Images { feed: feed.clone(), targets })
    }

    /// Whether a server lends them where they lie in its memory.
    pub(crate) fn are_lent(&self) -> bool {
        self.feed.is_lent()
    }

    /// Waits for the images, and writes them and their rates into the tensors.
    pub(crate) fn read(self) -> Result<()> {
        self.targets.into_iter().try_for_each(|((image, rates), place)| {
            image.read_weights(&self.feed, place.clone())?;
            rates.read_rates(&self.feed, place)
        })
    }
}

impl Training {
    /// The weights that were asked for, group by group, if this worker amends them: as they are before that. It waits for
    /// nothing.
    pub(crate) fn plain_images(&self, groups: Vec<Vec<Target>>) -> Result<Option<Vec<Images>>> {
        let Some(From::Later) = self.unread.as_ref().map(|unread| &unread.from) else { return Ok(None) };
        let Some(feed) = self.pipeline.next_image() else { return Ok(None) };
        let images = |targets| Images::new(&feed, &self.places, targets);
        groups.into_iter().map(images).collect::<Result<_>>().map(Some)
    }

    /// How these images are amended, once the step before is decided. None where they stay as they are.
    pub(crate) fn amendment(&self) -> Result<Option<Amendment>> {
        self.pipeline.next_amendment()
    }

    /// These parameters have the weights that were asked for.
    pub(crate) fn have(&mut self, params: &[usize]) {
        if let Some(unread) = &mut self.unread {
            params.iter().for_each(|param| _ = unread.left.remove(param));
        }
        // With the last one their memory goes back.
        self.unread.take_if(|unread| unread.left.is_empty());
    }
}
