//! Servers that own a unit's shards, and resources that do one thing at a time.

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Part {
    pub(super) group: usize,
    pub(super) elements: f64,
    /// The part's elements in its largest shard, which one server has.
    pub(super) longest: f64,
}

/// The most groups of servers that are simulated one by one. More servers share groups, so that a run of thousands
/// of servers takes no longer to simulate.
const MOST_GROUPS: f64 = 32.0;

pub(super) fn groups(servers: f64) -> usize {
    servers.clamp(1.0, MOST_GROUPS) as usize
}

pub(super) fn deal(sizes: impl Iterator<Item = f64>, shard: f64, groups: usize) -> Vec<Vec<Part>> {
    // The shard being dealt, and its remaining elements.
    let (mut index, mut left) = (0, shard);
    let unit = |size: f64| {
        let mut parts: Vec<Part> = Vec::new();
        let mut rest = size;
        while rest > 0.0 {
            let (elements, group) = (rest.min(left), index % groups);
            match parts.iter_mut().find(|part| part.group == group) {
                Some(part) => {
                    part.elements += elements;
                    part.longest = part.longest.max(elements);
                }
                None => parts.push(Part { group, elements, longest: elements }),
            }
            rest -= elements;
            left -= elements;
            if left <= 0.0 {
                (index, left) = (index + 1, shard);
            }
        }
        parts
    };
    sizes.map(unit).collect()
}

/// A resource that does one thing at a time.
///
/// The first request goes first. A later request that is ready earlier fills gaps.
#[derive(Clone, Default)]
pub(super) struct Line {
    /// Times of use, in order, without overlap.
    used: Vec<(f64, f64)>,
    pub(super) busy_s: f64,
}

impl Line {
    /// Uses the resource for `seconds`, from `ready_at` on. Returns the end.
    pub(super) fn take(&mut self, ready_at: f64, seconds: f64) -> f64 {
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
        // The gaps between the uses from `first` to `after` are full now, so these uses become one.
        let began_at = self.used[first..after].first().map_or(ready_at, |&(start, _)| start.min(ready_at));
        self.used.splice(first..after, [(began_at, done_at)]);
        done_at
    }
}
