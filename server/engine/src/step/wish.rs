//! An operator's wish for other servers, and the servers that an operator or rank 0 has given up as lost.

use longshore_proto::{Placement, ServerId, ShardId, Step, TierKind};

use super::{handover::Awaited, machine::Machine, refusal::Refusal};

/// Addresses of the servers that a job shall have, and when an operator asked for them.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    pub servers: Vec<String>,
    pub asked_micros: u64,
    /// Largest part of the time between two decisions that updates may wait for moves. 0: the default.
    pub max_exposed: f64,
    /// Tier of the job on new servers; None keeps the job's tier.
    pub tier: Option<TierKind>,
    /// Servers that are gone for good, as an operator or rank 0 says.
    pub lost: Vec<ServerId>,
    /// Number of requests so far. Watchers notice a new request by this number, since an operator's clock may be late.
    pub words: u64,
}

impl Wanted {
    /// Keeps a wish, unless a later one is known. A later wish takes back no loss, unless it names the server again.
    /// Servers that an operator gives up leave the wish.
    ///
    /// Rank 0 gives servers up without a wish, and the job may get them back later. So the earlier wish stays, and
    /// without one all members become the wish.
    pub fn take(&mut self, wanted: Wanted, placement: &Placement) {
        let (mut lost, words) = (std::mem::take(&mut self.lost), self.words + 1);
        let address = |server: &ServerId| placement.servers.get(server.0 as usize);
        let is_named = |server: &ServerId| address(server).is_some_and(|of| wanted.servers.contains(of));
        lost.retain(|lost| !is_named(lost) && !wanted.lost.contains(lost));
        lost.extend(&wanted.lost);
        if !wanted.servers.is_empty() {
            if self.asked_micros < wanted.asked_micros {
                *self = wanted;
            }
            self.servers.retain(|server| !lost.iter().any(|lost| address(lost) == Some(server)));
        } else if self.servers.is_empty() {
            (self.servers, self.asked_micros) = (placement.addresses().map(str::to_string).collect(), 1);
        }
        (self.lost, self.words) = (lost, words);
        // A loss may be reported after the decision that removed the server.
        self.forget_losses(placement);
    }

    /// Forgets the lost servers that are not in the placement any more.
    pub fn forget_losses(&mut self, placement: &Placement) {
        self.lost.retain(|lost| placement.members().any(|member| member == *lost));
    }
}

impl Machine {
    /// Returns a shard whose last copy is on these servers, as far as this server knows. State that this server still
    /// fetches from them is lost too.
    pub fn last_of(&self, lost: &[ServerId]) -> Option<ShardId> {
        let placement = self.placement();
        let is_last = |of: &Awaited| {
            let mut holders = placement.holders_at(of.shard, Step(u64::MAX));
            lost.contains(&of.source) && holders.all(|of| of == self.server || lost.contains(&of))
        };
        let unfetched = || self.unfinished().find(is_last).map(|of| of.shard);
        placement.last_of(lost).or_else(unfetched)
    }

    /// Refuses a copy of the state after `step` while no server answers for a shard: its holders at the step are given
    /// up, and the next holder begins with a later step.
    pub fn check_answered(&self, step: Step) -> Result<(), Refusal> {
        let placement = self.placement();
        let is_answered = |shard: &ShardId| {
            let holder = placement.holders_at(*shard, step).find(|holder| !self.lost.contains(holder));
            let owned = self.owned[shard.index()];
            holder.is_some_and(|of| of != self.server || owned.is_some_and(|owned| self.owns(owned, step)))
        };
        let shards = if self.lost.is_empty() { 0 } else { self.layout.shards() };
        match (0..shards).map(ShardId).find(|shard| !is_answered(shard)) {
            Some(shard) => Err(Refusal::GivenUp { shard, step }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_of_a_loss_that_comes_after_its_decision_is_not_kept() {
        let placement = Placement::striped(["a", "b"].map(String::from).to_vec(), 4);
        let lost = [1, 2].map(ServerId).to_vec();
        let mut known = Wanted::default();
        known.take(Wanted { lost, ..Wanted::default() }, &placement);
        assert_eq!((known.lost, known.words), (vec![ServerId(1)], 1));
    }
}
