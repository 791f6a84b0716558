//! Deals a unit to servers: shards are cut from the flat space, and dealt to the servers in turn.

/// The part of a unit on one group of servers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Part {
    pub(super) group: usize,
    pub(super) elements: f64,
    /// The most elements of the part in one shard, and so on one server.
    pub(super) longest: f64,
}

/// The most groups of servers that are simulated one by one. More servers share groups, so that a run of thousands
/// of servers takes no longer to simulate.
const MOST_GROUPS: f64 = 32.0;

pub(super) fn groups(servers: f64) -> usize {
    servers.clamp(1.0, MOST_GROUPS) as usize
}

/// Returns the parts of consecutive units.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_go_to_servers_in_turn_across_units() {
        let part = |group, elements, longest| Part { group, elements, longest };
        let dealt = deal([10.0, 3.0, 12.0].into_iter(), 4.0, 2);
        // Shards end at 4, 8, 12, 16, 20, 24 and 28. Units end at 10, 13 and 25.
        assert_eq!(dealt[0], [part(0, 6.0, 4.0), part(1, 4.0, 4.0)]);
        assert_eq!(dealt[1], [part(0, 2.0, 2.0), part(1, 1.0, 1.0)]);
        assert_eq!(dealt[2], [part(1, 7.0, 4.0), part(0, 5.0, 4.0)]);
        assert_eq!((groups(1.0), groups(8.0), groups(4096.0)), (1, 8, 32));
    }
}
