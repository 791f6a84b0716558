//! A rank's standing with the servers of its job: its incarnations, the version it joined at, its decisions, its
//! links, and how it joins a restarted server again.

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
