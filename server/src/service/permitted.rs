//! Check of messages that name a job: the name itself, and the caller's permission.

use longshore_proto::{Fault, JobName};
use longshore_wire::{self as wire, v1};
use tonic::{Request, Status};

use crate::{refusals, trust::Caller};

/// A message that names its job.
pub(super) trait OfJob {
    fn job(&self) -> Result<JobName, Fault>;
}

macro_rules! of_job {
    ($($message:ident),* $(,)?) => {
        $(impl OfJob for v1::$message {
            fn job(&self) -> Result<JobName, Fault> {
                wire::parse_name("job", &self.job)
            }
        })*
    };
}

of_job!(
    AwaitDurableRequest,
    CheckpointRequest,
    CommitRequest,
    DeleteJobRequest,
    DescribeRequest,
    DiscardCheckpointRequest,
    ExportRequest,
    JoinRequest,
    LeaveRequest,
    ListCheckpointsRequest,
    PauseRequest,
    PullRequest,
    PushRequest,
    RestoreRequest,
    ResumeRequest,
    SealCheckpointRequest,
    StatsRequest,
    StepBackRequest,
    UploadRequest,
    WatchRequest,
);

impl OfJob for v1::OpenJobRequest {
    fn job(&self) -> Result<JobName, Fault> {
        let spec = self.spec.as_ref().ok_or_else(|| wire::missing("spec"))?;
        wire::parse_name("spec.name", &spec.name)
    }
}

/// Checks that the caller may make its call on the message's job.
pub(super) fn permit(caller: &Caller, message: &impl OfJob) -> Result<(), Fault> {
    caller.permit(&message.job()?)
}

/// Returns the message if its caller may make this call on its job.
pub(super) fn permitted<T: OfJob>(request: Request<T>) -> Result<T, Status> {
    let permitted = Caller::of(request.extensions()).and_then(|caller| permit(&caller, request.get_ref()));
    permitted.map_err(|fault| refusals::status(&fault))?;
    Ok(request.into_inner())
}
