//! The data plane's calls. Push and Pull work below the codec, each in its own module. Fetch, and Upload of initial
//! weights and optimizer state, use generated code.

use std::{
    convert::Infallible,
    task::{Context, Poll},
};

use futures_util::future::BoxFuture;
use http::{Request, Response};
use longshore_engine::job::UploadChunk;
use longshore_proto::{
    ChunkId, Fault, FaultKind, ShardId,
    checksum::crc32,
    limits::{CHUNK_BYTES, CHUNK_HEADROOM_BYTES},
};
use longshore_wire::{
    self as wire,
    direct::Connection,
    frame::{PULL, PUSH},
    v1::{
        self,
        tensors_server::{Tensors, TensorsServer},
    },
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming, body::Body, server::NamedService};
use tower_service::Service;

use super::{
    Services, blocking, fetch,
    permitted::{Call, permit},
    pull, push, refuse,
    room::{Answers, Room},
};
use crate::trust::Caller;

/// Service `longshore.v1.Tensors`. Push and Pull are served by hand, and look to callers like the generated calls.
#[derive(Clone)]
pub(crate) struct DataPlane {
    services: Services,
    generated: TensorsServer<Services>,
}

impl DataPlane {
    pub(crate) fn new(services: Services) -> DataPlane {
        let generated = TensorsServer::new(services.clone())
            .max_decoding_message_size(CHUNK_BYTES + CHUNK_HEADROOM_BYTES);
        DataPlane { services, generated }
    }
}

impl NamedService for DataPlane {
    const NAME: &'static str = <TensorsServer<Services> as NamedService>::NAME;
}

impl Service<Request<Body>> for DataPlane {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        match request.uri().path() {
            PUSH => {
                let connection = Connection::of(request.extensions()).cloned();
                let answer = Caller::of(request.extensions()).map(|caller| {
                    push::answer(self.services.clone(), caller, connection, request.into_body())
                });
                let answer = answer.unwrap_or_else(|fault| refuse("Push", "", fault).into_http());
                Box::pin(std::future::ready(Ok(answer)))
            }
            PULL => {
                let services = self.services.clone();
                Box::pin(async move {
                    let connection = Connection::of(request.extensions()).cloned();
                    let room = Room::of(request.extensions());
                    let answer = async {
                        let caller =
                            Caller::of(request.extensions()).map_err(|fault| refuse("Pull", "", fault))?;
                        pull::answer(&services, &caller, connection.as_ref(), room, request.into_body()).await
                    };
                    Ok(answer.await.unwrap_or_else(Status::into_http))
                })
            }
            _ => self.generated.call(request),
        }
    }
}

fn below_the_codec<T>() -> Result<T, Status> {
    Err(Status::internal("this call is served below the codec"))
}

#[tonic::async_trait]
impl Tensors for Services {
    type PushStream = ReceiverStream<Result<v1::PushResponse, Status>>;

    async fn push(
        &self,
        _: tonic::Request<Streaming<v1::PushRequest>>,
    ) -> Result<tonic::Response<Self::PushStream>, Status> {
        below_the_codec()
    }

    type PullStream = ReceiverStream<Result<v1::PullResponse, Status>>;

    async fn pull(
        &self,
        _: tonic::Request<v1::PullRequest>,
    ) -> Result<tonic::Response<Self::PullStream>, Status> {
        below_the_codec()
    }

    type FetchStream = Answers<v1::FetchResponse>;

    async fn fetch(
        &self,
        request: tonic::Request<v1::FetchRequest>,
    ) -> Result<tonic::Response<Self::FetchStream>, Status> {
        let (call, request) = Call::permitted(request)?;
        let parts = fetch::stream(self, &request, call.room.clone());
        parts.map(tonic::Response::new).map_err(|fault| call.refuse(fault))
    }

    async fn upload(
        &self,
        request: tonic::Request<Streaming<v1::UploadRequest>>,
    ) -> Result<tonic::Response<v1::UploadResponse>, Status> {
        let caller = Caller::of(request.extensions()).map_err(|fault| refuse("Upload", "", fault))?;
        let chunks = receive(self, &caller, request.into_inner()).await?;
        Ok(tonic::Response::new(v1::UploadResponse { chunks }))
    }
}

/// Stores chunks until the stream ends, and returns their number.
async fn receive(
    services: &Services,
    caller: &Caller,
    mut requests: Streaming<v1::UploadRequest>,
) -> Result<u64, Status> {
    let mut chunks = 0;
    while let Some(request) = requests.message().await? {
        let job = request.job.clone();
        let stored = async {
            permit(caller, &request)?;
            store(services, request).await
        };
        stored.await.map_err(|fault| refuse("Upload", &job, fault))?;
        chunks += 1;
    }
    Ok(chunks)
}

async fn store(services: &Services, request: v1::UploadRequest) -> Result<(), Fault> {
    let found = crc32(&request.payload);
    if found != request.crc32 {
        let value = format!("{:08x}", request.crc32);
        let limit = format!("{found:08x}, the CRC-32 of the payload received");
        return Err(Fault::new(FaultKind::Corrupt, "upload.crc32", value, limit, "send the chunk again"));
    }
    let incarnation = wire::incarnation_from_wire(request.incarnation)?;
    let part = UploadChunk {
        shard: ShardId(request.shard),
        array: wire::array_from_wire("array", request.array)?,
        chunk: ChunkId(request.chunk),
        applied: request.applied,
        left_out: wire::left_outs_from_wire(request.left_out),
        crc32: request.crc32,
    };
    let handle = services.jobs.get(&request.job)?;
    // The call with the last chunk also builds the first image of every shard, which takes long.
    blocking(move || handle.job.upload_chunk(incarnation, part, &request.payload)).await
}
