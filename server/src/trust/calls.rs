//! Every gRPC call of a server, with its roles and its scope.

use super::identities::Role::{self, Operator, Reader, Worker};

/// Scope of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// The job that the message names.
    Job,
    /// All jobs: only an identity with the jobs `*` may make it.
    AllJobs,
    /// No job: answers list only jobs that the identity may see.
    Nothing,
}

/// A gRPC call.
#[derive(Debug)]
pub(super) struct Call {
    path: &'static str,
    /// Roles that may make the call. An identity needs one of them.
    pub(super) roles: &'static [Role],
    pub(super) scope: Scope,
    /// The call is logged for audit.
    pub(super) audited: bool,
}

const ALL: &[Role] = &[Reader, Worker, Operator];
const TRAIN: &[Role] = &[Worker];
/// Roles that may read and write a job's state.
pub(super) const TEND: &[Role] = &[Worker, Operator];
/// Roles that decide on which servers a job is, and whether it stays.
pub(super) const OPERATE: &[Role] = &[Operator];

const fn call(path: &'static str, roles: &'static [Role]) -> Call {
    Call { path, roles, scope: Scope::Job, audited: false }
}

const fn act(path: &'static str, roles: &'static [Role]) -> Call {
    Call { path, roles, scope: Scope::Job, audited: true }
}

const fn without_job(path: &'static str) -> Call {
    Call { path, roles: ALL, scope: Scope::Nothing, audited: false }
}

/// Reading the HTTP address, whose pages show all jobs. The path is no gRPC path, so no call matches it.
pub(super) static PAGES: Call = Call { path: "/http", roles: ALL, scope: Scope::AllJobs, audited: false };

/// Rank 0 writes checkpoints, steps back and restores during training, so these calls need no operator. Calls that give
/// up state need one.
static CALLS: &[Call] = &[
    without_job("/longshore.v1.Admin/ListJobs"),
    call("/longshore.v1.Admin/Describe", ALL),
    call("/longshore.v1.Admin/DescribeInParts", ALL),
    call("/longshore.v1.Admin/ListCheckpoints", ALL),
    act("/longshore.v1.Admin/Export", ALL),
    act("/longshore.v1.Admin/Checkpoint", TEND),
    act("/longshore.v1.Admin/SealCheckpoint", TEND),
    act("/longshore.v1.Admin/DiscardCheckpoint", TEND),
    act("/longshore.v1.Admin/Restore", TEND),
    act("/longshore.v1.Admin/StepBack", TEND),
    act("/longshore.v1.Admin/Resume", OPERATE),
    act("/longshore.v1.Admin/Scale", TEND),
    act("/longshore.v1.Admin/DeleteJob", OPERATE),
    Call { path: "/longshore.v1.Admin/Drain", roles: OPERATE, scope: Scope::AllJobs, audited: true },
    call("/longshore.v1.Tensors/Push", TRAIN),
    call("/longshore.v1.Tensors/Pull", ALL),
    call("/longshore.v1.Tensors/Upload", TRAIN),
    act("/longshore.v1.Tensors/Fetch", TEND),
    call("/longshore.v1.Training/OpenJob", TEND),
    call("/longshore.v1.Training/Join", TEND),
    act("/longshore.v1.Training/Begin", TEND),
    act("/longshore.v1.Training/Retire", TEND),
    call("/longshore.v1.Training/Stats", TRAIN),
    call("/longshore.v1.Training/Commit", TRAIN),
    call("/longshore.v1.Training/AwaitDurable", ALL),
    call("/longshore.v1.Training/Watch", ALL),
    act("/longshore.v1.Training/Pause", TEND),
    call("/longshore.v1.Training/Leave", TRAIN),
    without_job("/grpc.health.v1.Health/Check"),
    without_job("/grpc.health.v1.Health/Watch"),
    without_job("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
    without_job("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
];

impl Call {
    /// Returns the call of a path, or None for an unknown path.
    pub(super) fn at(path: &str) -> Option<&'static Call> {
        CALLS.iter().find(|call| call.path == path)
    }

    pub(super) fn name(&self) -> &'static str {
        self.path.rsplit('/').next().unwrap_or(self.path)
    }
}
