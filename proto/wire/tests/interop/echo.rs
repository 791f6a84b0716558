//! A tonic server that echoes each request, so that tests can compare both directions.

use longshore_wire::v1::{
    PullRequest, PullResponse, PushRequest, PushResponse, PushResult, UploadRequest, UploadResponse,
    tensors_server::Tensors,
};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

pub(crate) struct Echo;

type Answers<T> = std::pin::Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Tensors for Echo {
    type PushStream = Answers<PushResponse>;

    async fn push(
        &self,
        request: Request<Streaming<PushRequest>>,
    ) -> Result<Response<Self::PushStream>, Status> {
        let answers = request.into_inner().map(|request| {
            let PushRequest { step, micro_step, shard, payload, .. } = request?;
            let chunk = longshore_proto::checksum::crc32(&payload);
            let result =
                PushResult { step, micro_step, shard, chunk, duplicate: true, ..PushResult::default() };
            Ok(PushResponse { results: vec![result] })
        });
        Ok(Response::new(Box::pin(answers)))
    }

    type PullStream = Answers<PullResponse>;

    async fn pull(&self, request: Request<PullRequest>) -> Result<Response<Self::PullStream>, Status> {
        let request = request.into_inner();
        if request.job != "echo" {
            return Err(Status::not_found("no such job"));
        }
        let end = (request.version == 9).then(|| Err(Status::data_loss("half way")));
        let answers = request.slices.into_iter().map(|slice| {
            let payload = vec![slice.shard as u8; slice.elements as usize].into();
            Ok(PullResponse {
                shard: slice.shard,
                offset: slice.offset,
                crc32: 7,
                decided_by: 5,
                payload,
                ..PullResponse::default()
            })
        });
        Ok(Response::new(Box::pin(tokio_stream::iter(answers.chain(end).collect::<Vec<_>>()))))
    }

    async fn upload(&self, _: Request<Streaming<UploadRequest>>) -> Result<Response<UploadResponse>, Status> {
        Err(Status::unimplemented("not here"))
    }
}
