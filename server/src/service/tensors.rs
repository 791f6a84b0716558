//! The data plane's calls, each in its own module: Push and Pull below the codec, the others through generated
//! code.

use std::{
    convert::Infallible,
    task::{Context, Poll},
};

use futures_util::future::BoxFuture;
use http::{Request, Response};
use longshore_proto::limits::{CHUNK_BYTES, CHUNK_HEADROOM_BYTES};
use longshore_wire::{
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

use super::{Services, pull, push, refuse, room::Room, upload};
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

    async fn upload(
        &self,
        request: tonic::Request<Streaming<v1::UploadRequest>>,
    ) -> Result<tonic::Response<v1::UploadResponse>, Status> {
        let caller = Caller::of(request.extensions()).map_err(|fault| refuse("Upload", "", fault))?;
        let chunks = upload::receive(self, &caller, request.into_inner()).await?;
        Ok(tonic::Response::new(v1::UploadResponse { chunks }))
    }
}
