//! The data plane's calls; each has a module of its own.

use futures_util::stream::BoxStream;
use longshore_proto::wire::v1::{self, tensors_server::Tensors};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::{Services, pull, push, refuse, upload};

#[tonic::async_trait]
impl Tensors for Services {
    type PushStream = BoxStream<'static, Result<v1::PushResponse, Status>>;

    async fn push(
        &self,
        request: Request<Streaming<v1::PushRequest>>,
    ) -> Result<Response<Self::PushStream>, Status> {
        Ok(Response::new(push::stream(self.clone(), request.into_inner())))
    }

    type PullStream = ReceiverStream<Result<v1::PullResponse, Status>>;

    async fn pull(&self, request: Request<v1::PullRequest>) -> Result<Response<Self::PullStream>, Status> {
        let request = request.into_inner();
        let job = request.job.clone();
        let stream = pull::stream(self, request).map_err(|fault| refuse("Pull", &job, fault))?;
        Ok(Response::new(stream))
    }

    async fn upload(
        &self,
        request: Request<Streaming<v1::UploadRequest>>,
    ) -> Result<Response<v1::UploadResponse>, Status> {
        let chunks = upload::receive(self, request.into_inner()).await?;
        Ok(Response::new(v1::UploadResponse { chunks }))
    }
}
