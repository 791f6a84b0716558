//! File descriptors: the limit is raised as far as possible, and divided between connections and the rest.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit as far as this process may, and returns it.
pub(crate) fn raise() -> usize {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::debug!(%error, "the limit of descriptors stays as it is");
    }
    getrlimit(Resource::Nofile)
        .current
        .map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Returns the number of connections that leaves descriptors for the rest. The rest is state files, checkpoints,
/// and memfd links with their memory.
pub(crate) fn for_connections(limit: usize) -> usize {
    limit - (limit / 4).clamp(24, 1024).min(limit / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_some_for_the_rest() {
        for (limit, connections) in [(32, 16), (64, 40), (1024, 768), (20_000, 18_976)] {
            assert_eq!(for_connections(limit), connections);
        }
        assert!(raise() > 0);
    }
}
