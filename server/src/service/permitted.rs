//! Check of messages that name a job: the name itself, and the caller's permission.

use longshore_proto::{Fault, JobName};
use longshore_wire::{self as wire, v1};
use tonic::{Request, Status};

use crate::{refusals, trust::Caller};

/// A message that names its job.
pub(super) trait OfJob {
    /// Field of the name.
    const FIELD: &str = "job";

    /// Returns the name as the caller wrote it. None without the message that has it.
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
/// the right hears of the right alone.
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

/// Returns the message if its caller may make this call on its job.
pub(super) fn permitted<T: OfJob>(request: Request<T>) -> Result<T, Status> {
    let permitted = Caller::of(request.extensions()).and_then(|caller| permit(&caller, request.get_ref()));
    permitted.map_err(|fault| refusals::status(&fault))?;
    Ok(request.into_inner())
}
