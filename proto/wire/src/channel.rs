//! A connection for calls: tonic's channel, which adds its caller's token to each call, or a link without a socket.

use std::{
    error::Error,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response, header::AUTHORIZATION};
use tonic::{body::Body, transport::channel};
use tower_service::Service;

use crate::tls::Credentials;

pub type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Box<dyn Error + Send + Sync>>> + Send>>;

/// Carries calls to a server. A clone is cheap.
#[derive(Clone)]
pub struct Channel(Link);

#[derive(Clone)]
enum Link {
    /// A connection that redials by itself.
    Dialled(channel::Channel, Option<Credentials>),
    Carried(Arc<dyn Fn(Request<Body>) -> Answer + Send + Sync>),
}

impl Channel {
    /// `credentials` are those that the channel was dialled with. None without encryption, so that no token is sent in
    /// plain text.
    pub fn new(channel: channel::Channel, credentials: Option<Credentials>) -> Channel {
        Channel(Link::Dialled(channel, credentials))
    }

    /// Returns a channel without a socket: `carry` answers each call. Used for a server in this process, and in simulations.
    pub fn carried(carry: impl Fn(Request<Body>) -> Answer + Send + Sync + 'static) -> Channel {
        Channel(Link::Carried(Arc::new(carry)))
    }
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Body>;
    type Error = Box<dyn Error + Send + Sync>;
    type Future = Answer;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        match &mut self.0 {
            Link::Dialled(channel, _) => channel.poll_ready(context).map_err(Into::into),
            Link::Carried(_) => Poll::Ready(Ok(())),
        }
    }

    fn call(&mut self, mut request: Request<Body>) -> Answer {
        match &mut self.0 {
            Link::Dialled(channel, credentials) => {
                if let Some(bearer) = credentials.as_ref().and_then(Credentials::bearer) {
                    request.headers_mut().insert(AUTHORIZATION, bearer);
                }
                let answer = channel.call(request);
                Box::pin(async { Ok(answer.await?) })
            }
            Link::Carried(carry) => carry(request),
        }
    }
}
