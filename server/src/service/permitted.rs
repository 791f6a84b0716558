//! Permission check for messages that name a job.

use longshore_wire::v1;
use tonic::{Request, Status};

use crate::{refusals, trust::Caller};

/// A message that names its job.
pub(super) trait OfJob {
    fn job(&self) -> &str;
}

macro_rules! of_job {
    ($($message:ident),* $(,)?) => {
        $(impl OfJob for v1::$message {
            fn job(&self) -> &str {
                &self.job
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
    RestoreRequest,
    ResumeRequest,
    SealCheckpointRequest,
    StatsRequest,
    StepBackRequest,
    WatchRequest,
);

impl OfJob for v1::OpenJobRequest {
    fn job(&self) -> &str {
        self.spec.as_ref().map_or("", |spec| &spec.name)
    }
}

/// Returns the message if its caller may make this call on its job.
pub(super) fn permitted<T: OfJob>(request: Request<T>) -> Result<T, Status> {
    let permitted =
        Caller::of(request.extensions()).and_then(|caller| caller.permit(request.get_ref().job()));
    permitted.map_err(|fault| refusals::status(&fault))?;
    Ok(request.into_inner())
}
