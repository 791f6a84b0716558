//! Identifies the caller of each call before any message is read, and ends calls whose permission is revoked.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, header::AUTHORIZATION};
use http_body::{Frame, SizeHint};
use longshore_proto::{Fault, FaultKind};
use longshore_wire::direct::Connection;
use tonic::{Status, body::Body, server::NamedService};
use tower_service::Service;

use super::{
    audit::{self, Record},
    caller::{Caller, Who},
    calls::Call,
    identities::Credential,
    register::Register,
};
use crate::{
    connections::Origin,
    log::Seldom,
    members::Members,
    refusals,
    requests::{Answering, metered},
};

/// Callers that a listener trusts.
#[derive(Clone)]
pub(crate) enum Trust {
    /// Everyone: an operator has chosen so (`--insecure`).
    Anybody,
    /// Users of this host over loopback: this server's user and root.
    Neighbours(Members),
    /// Users admitted to the Unix socket.
    User,
    /// Listed identities.
    Listed(Arc<Register>),
}

/// A service that knows its callers, and counts their messages.
#[derive(Clone)]
pub(crate) struct Guard<S> {
    service: S,
    trust: Trust,
    strangers: Arc<Seldom>,
}

impl<S> Guard<S> {
    pub(crate) fn new(service: S, trust: &Trust) -> Guard<S> {
        Guard { service, trust: trust.clone(), strangers: Arc::default() }
    }

    /// Returns the caller, if its identity may make such calls at all.
    fn admit(&self, request: &Request<Body>, call: &'static Call) -> Result<Caller, Fault> {
        let who = self.trust.who(request);
        let is_stranger = who.is_err();
        let admitted = who.and_then(|who| {
            let caller = Caller::new(who, call);
            let checked = caller.check(None);
            if let Err(fault) = checked.as_ref()
                && fault.kind == FaultKind::Forbidden
            {
                audit::refused(&caller, fault);
            }
            checked?;
            caller.be_present(Connection::of(request.extensions()))?;
            Ok(caller)
        });
        // Rate-limited, since strangers could fill the log.
        if let Err(fault) = admitted.as_ref()
            && (is_stranger || fault.kind == FaultKind::Unauthenticated)
        {
            let call = call.name();
            self.strangers.say(|| tracing::info!(target: "audit", call, %fault, "a stranger's call"));
        }
        admitted
    }
}

impl<S: NamedService> NamedService for Guard<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Guard<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let Some(call) = Call::at(request.uri().path()) else {
            // The inner service refuses unknown paths.
            return Box::pin(self.service.call(Request::new(Body::empty())));
        };
        let caller = match self.admit(&request, call) {
            Ok(caller) => caller,
            Err(fault) => return Box::pin(std::future::ready(Ok(refusals::status(&fault).into_http()))),
        };
        request.extensions_mut().insert(caller.clone());
        // The record is dropped with the call's future, even if the future was never polled.
        let record = Record::of(&caller);
        let answer = metered(&mut self.service, request);
        Box::pin(async move {
            let answer = tokio::select! {
                // A finished answer is logged as done. A revoked caller gets nothing of the answer.
                biased;
                answer = answer => answer?,
                fault = caller.revoked() => {
                    record.revoked(&fault);
                    return Ok(refusals::status(&fault).into_http());
                }
            };
            record.answered(answer.headers());
            Ok(if caller.is_listed() {
                answer.map(|body| Body::new(Guarded::new(body, caller)))
            } else {
                answer
            })
        })
    }
}

impl Trust {
    fn who(&self, request: &Request<Body>) -> Result<Who, Fault> {
        let register = match self {
            Trust::Anybody => return Ok(Who::Anybody),
            Trust::User => return Ok(Who::User),
            Trust::Neighbours(members) => return neighbour(*members, Connection::of(request.extensions())),
            Trust::Listed(register) => Arc::clone(register),
        };
        let credential = match request.headers().get(AUTHORIZATION) {
            Some(value) => Credential::of_token(bearer(value.as_bytes()).ok_or_else(not_a_bearer)?),
            None => {
                let connection = Connection::of(request.extensions());
                let certificate =
                    connection.and_then(|of| of.certificate.clone()).ok_or_else(nothing_shown)?;
                Credential::Certificate(certificate)
            }
        };
        Ok(Who::Listed { register, credential })
    }
}

/// Returns the token of an Authorization header. The scheme's name is case-insensitive.
pub(super) fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(b"Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

/// Admits a caller over loopback by its user, which the kernel named when the connection was accepted.
fn neighbour(members: Members, connection: Option<&Connection>) -> Result<Who, Fault> {
    let origin =
        connection.and_then(|of| of.kept().iter().find_map(|kept| kept.downcast_ref::<Origin>().copied()));
    let user = match origin {
        Some(Origin::Neighbour { user, .. }) => user,
        _ => None,
    };
    // The kernel's table names no group, and loopback admits by none, so any number stands for the group.
    if user.is_some_and(|user| members.admit(user, u32::MAX)) {
        return Ok(Who::User);
    }
    let limit = format!("user {}, whose server this is, or root", members.own());
    let remedy = "connect as that user or over --listen-unix with --unix-group, or start the server with --tls-dir, or with --insecure \
                  to trust every user of its host";
    Err(match user {
        Some(user) => {
            let value = format!("user {user} of this host, over unencrypted TCP");
            Fault::new(FaultKind::Forbidden, "caller", value, limit, remedy)
        }
        None => {
            let value = "on loopback, and the kernel names no user of it";
            Fault::new(FaultKind::Unauthenticated, "caller", value, limit, remedy)
        }
    })
}

fn nothing_shown() -> Fault {
    let remedy = "call with client.pem and client.key, or with a token, in the TLS folder";
    let limit = "a certificate, or a token (authorization: Bearer ...)";
    Fault::new(FaultKind::Unauthenticated, "identity", "not shown", limit, remedy)
}

fn not_a_bearer() -> Fault {
    let limit = "Bearer and a token";
    Fault::new(FaultKind::Unauthenticated, "authorization", "of another kind", limit, "send a token so")
}

/// An answer that ends, with the reason, when its caller's permission is revoked.
struct Guarded {
    body: Body,
    revoked: Pin<Box<dyn Future<Output = Fault> + Send>>,
    over: bool,
}

impl Guarded {
    fn new(body: Body, caller: Caller) -> Guarded {
        Guarded { body, revoked: Box::pin(async move { caller.revoked().await }), over: false }
    }
}

impl http_body::Body for Guarded {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if self.over {
            return Poll::Ready(None);
        }
        if let Poll::Ready(fault) = self.revoked.as_mut().poll(context) {
            self.over = true;
            // Dropping the body tells its producer that no reader is left.
            self.body = Body::empty();
            let mut trailers = HeaderMap::new();
            refusals::status(&fault).add_header(&mut trailers)?;
            return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
        }
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.over || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
