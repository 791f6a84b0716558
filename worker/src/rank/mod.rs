//! What the servers of a job know this process as: its rank's incarnation, the version it joined at, the decisions that
//! it made, and how it joins again a server that restarted.

mod commits;
mod join;
mod links;
mod recover;
mod state;
mod withdraw;

pub(crate) use self::{
    commits::{OwnCommit, await_durable, commit_as},
    join::fence,
    recover::{check_not_fenced, decide_on, is_undecided, recover, version_when_running},
    state::RankState,
    withdraw::withdraw,
};
