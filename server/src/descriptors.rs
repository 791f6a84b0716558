//! File descriptors: as many as the host allows, shared between connections and everything else.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit as far as this process may, and says how high it is.
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

/// How many connections leave enough descriptors for state files, checkpoints, and links with the memory that comes
/// over them.
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
