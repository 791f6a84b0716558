//! What one rank's process is to the servers of its job: which process it is, since when it takes part, which decisions it
//! made, and how it comes back to a server that restarted.

mod commits;
mod join;
mod links;
mod recover;
mod state;

pub(crate) use self::{
    commits::{OwnCommit, await_durable, commit_as},
    join::fence,
    recover::{check_not_fenced, check_reproducible, is_undecided, recover, version, version_when_running},
    state::RankState,
};
