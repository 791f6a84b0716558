//! A rank's standing with its job's servers: incarnations, the version at its join, decisions, and links. Also joins
//! restarted servers again. Sessions, lanes and pipelines share this state.

mod commits;
mod join;
mod number;
mod recover;
mod state;

pub(crate) use self::{
    commits::{OwnCommit, await_durable, commit_as},
    join::fence,
    number::{begin, clock_ahead, take},
    recover::{
        cause, check_not_fenced, decide_on, is_undecided, recover, version, version_when_running, withdraw,
    },
    state::RankState,
};
