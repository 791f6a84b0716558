//! Calls of this process, without a socket. The caller's thread runs them.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use http::Request;
use longshore_engine::memory::float::Standard;
use longshore_wire::{
    Answer,
    frame::{PULL, PUSH},
};
use tokio::runtime::Handle;
use tonic::{body::Body, service::Routes};
use tower_service::Service;

/// Paths of the calls of a training step, whose tasks end with their caller. Such tasks run on the caller's runtime,
/// since each change of thread costs a small step 30 us. Tasks of other calls may outlast the call, and run on the
/// server's runtime.
const OF_CALLER: [&str; 4] = [PUSH, PULL, "/longshore.v1.Training/Stats", "/longshore.v1.Training/Watch"];

pub(super) fn carry(users: &Routes, runtime: &Handle, request: Request<Body>) -> Answer {
    let runtime = (!OF_CALLER.contains(&request.uri().path())).then(|| runtime.clone());
    let mut users = users.clone();
    let answer: Answer = Box::pin(async move { Ok(users.call(request).await?) });
    Box::pin(Here { answer, runtime })
}

/// A call on its caller's thread, whose floating-point mode may be another.
struct Here {
    answer: Answer,
    runtime: Option<Handle>,
}

impl Future for Here {
    type Output = <Answer as Future>::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Here { answer, runtime } = &mut *self;
        let _standard = Standard::enter();
        let _entered = runtime.as_ref().map(Handle::enter);
        answer.as_mut().poll(context)
    }
}
