//! Calls on a job: the check of the job's name and of the caller's permission, and refusals.

use longshore_proto::{Fault, JobName};
use longshore_wire::{self as wire, v1};
use tonic::{Request, Status};

use super::{refuse, room::Room};
use crate::trust::Caller;

/// A message that names its job.
pub(super) trait OfJob {
    /// Field of the message that holds the name.
    const FIELD: &str = "job";

    /// Returns the name as the caller wrote it. None if the part of the message that holds the name is absent.
    fn job(&self) -> Option<&str>;
}

macro_rules! of_job {
    ($($message:ident),* $(,)?) => {
        $(impl OfJob for v1::$message {
            fn job(&self) -> Option<&str> {
                Some(&self.job)
            }
        })*
    };
}

of_job!(
    AwaitDurableRequest,
    BeginRequest,
    CheckpointRequest,
    CommitRequest,
    DeleteJobRequest,
    DescribeRequest,
    DiscardCheckpointRequest,
    ExportRequest,
    FetchRequest,
    JoinRequest,
    LeaveRequest,
    ListCheckpointsRequest,
    PauseRequest,
    PullRequest,
    PushRequest,
    RestoreRequest,
    ResumeRequest,
    RetireRequest,
    ScaleRequest,
    SealCheckpointRequest,
    StatsRequest,
    StepBackRequest,
    UploadRequest,
    WatchRequest,
);

impl OfJob for v1::OpenJobRequest {
    const FIELD: &str = "spec.name";

    fn job(&self) -> Option<&str> {
        self.spec.as_ref().map(|spec| spec.name.as_str())
    }
}

/// Checks that the caller may make its call on the message's job, and then the form of the job's name. A caller without
/// the permission is told only that, and nothing about the name.
pub(super) fn permit<M: OfJob>(caller: &Caller, message: &M) -> Result<(), Fault> {
    let job = message.job();
    match JobName::parse(M::FIELD, job.unwrap_or_default()) {
        Ok(name) => caller.permit(&name),
        Err(wrong) => {
            caller.may_name(job.unwrap_or_default())?;
            Err(job.map_or_else(|| wire::missing("spec"), |_| wrong))
        }
    }
}

/// A call on a job, after the check of its caller.
pub(super) struct Call {
    pub(super) caller: Caller,
    /// Room of the call's connection.
    pub(super) room: Room,
    job: String,
}

impl Call {
    /// Checks that the caller may make this call on the message's job, and returns the call and its message.
    pub(super) fn permitted<M: OfJob>(request: Request<M>) -> Result<(Call, M), Status> {
        let caller = Caller::of(request.extensions()).map_err(|fault| refuse("", "", fault))?;
        permit(&caller, request.get_ref()).map_err(|fault| refuse(caller.call(), "", fault))?;
        let (room, message) = (Room::of(request.extensions()), request.into_inner());
        let job = message.job().unwrap_or_default().to_string();
        Ok((Call { caller, room, job }, message))
    }

    /// Logs and counts the refused call, and returns its status.
    pub(super) fn refuse(&self, fault: Fault) -> Status {
        refuse(self.caller.call(), &self.job, fault)
    }
}
