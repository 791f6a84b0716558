//! tonic's channel with its caller's token on each call.

use std::task::{Context, Poll};

use http::{Request, Response, header::AUTHORIZATION};
use tonic::{
    body::Body,
    transport::{Error, channel},
};
use tower_service::Service;

use crate::tls::Credentials;

/// A connection that redials by itself. A clone is cheap.
#[derive(Clone)]
pub struct Channel {
    channel: channel::Channel,
    credentials: Option<Credentials>,
}

impl Channel {
    /// `credentials` are those that the channel was dialled with. None without encryption, so that no token is sent in
    /// plain text.
    pub fn new(channel: channel::Channel, credentials: Option<Credentials>) -> Channel {
        Channel { channel, credentials }
    }
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Body>;
    type Error = Error;
    type Future = channel::ResponseFuture;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.channel.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(bearer) = self.credentials.as_ref().and_then(Credentials::bearer) {
            request.headers_mut().insert(AUTHORIZATION, bearer);
        }
        self.channel.call(request)
    }
}
