//! Responses for each path of the HTTP address.

use std::sync::Arc;

use bytes::Bytes;
use http::{
    HeaderValue, Method, Response, StatusCode, Uri,
    header::{
        ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, WWW_AUTHENTICATE,
        X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
    },
};
use http_body_util::Full;
use longshore_proto::{Fault, FaultKind};
use tokio::{sync::Semaphore, task::spawn_blocking};

use super::{
    metrics::{self, Format},
    report::{self, Listen, Wanted},
};
use crate::service::Services;

/// Largest number of responses built at once, since jobs share the pool of blocking threads with them.
const MAKING: usize = 2;
const TEXT: &str = "text/plain; charset=utf-8";
const PAGE: &str = include_str!("page/index.html");
const SCRIPT: &str = include_str!("page/page.js");
const STYLE: &str = include_str!("page/page.css");
/// The page loads its own three files and nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; frame-ancestors 'none'";

pub(super) struct Answers {
    services: Services,
    /// Address at which workers reach this server.
    listen: Listen,
    /// A permit for each response being built. A closed connection leaves its response in progress, so connections do
    /// not bound the number.
    making: Arc<Semaphore>,
}

impl Answers {
    pub(super) fn new(services: Services, listen: Listen) -> Answers {
        Answers { services, listen, making: Arc::new(Semaphore::new(MAKING)) }
    }

    /// Returns the response to a request. `admitted` permits the reader to see names of jobs.
    pub(super) async fn to(
        &self,
        method: &Method,
        uri: &Uri,
        accept: &str,
        admitted: Result<(), Fault>,
    ) -> Response<Full<Bytes>> {
        if method != Method::GET && method != Method::HEAD {
            let mut answer = answer(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET and HEAD\n");
            answer.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return answer;
        }
        match (uri.path(), admitted) {
            ("/healthz", _) => answer(StatusCode::OK, TEXT, "ok\n"),
            ("/readyz", admitted) => self.ready(admitted.is_ok()),
            (_, Err(fault)) => refusal(&fault),
            (path, Ok(())) => self.page(path, uri, accept).await,
        }
    }

    async fn page(&self, path: &str, uri: &Uri, accept: &str) -> Response<Full<Bytes>> {
        match path {
            "/" => answer(StatusCode::OK, "text/html; charset=utf-8", PAGE),
            "/page.js" => answer(StatusCode::OK, "text/javascript; charset=utf-8", SCRIPT),
            "/page.css" => answer(StatusCode::OK, "text/css; charset=utf-8", STYLE),
            "/metrics" => {
                let format = Format::of(accept);
                self.made(format.content_type(), move |services| metrics::text(services, format)).await
            }
            "/status.json" => {
                let (wanted, listen) = (Wanted::of(uri.query().unwrap_or_default()), self.listen.clone());
                self.made("application/json", move |services| report::json(&services, listen, &wanted)).await
            }
            _ => answer(
                StatusCode::NOT_FOUND,
                TEXT,
                "not here: / is the status page; there are /metrics, /healthz, /readyz and /status.json\n",
            ),
        }
    }

    /// Answers ready once the server has tried to open each stored job, and until a drain begins. A job that cannot be
    /// served is named, and leaves the server ready for the other jobs.
    fn ready(&self, names: bool) -> Response<Full<Bytes>> {
        let services = &self.services;
        let draining = services.draining.refuse();
        let (status, mut text) = match draining.is_ok() && services.jobs.has_recovered() {
            true => (StatusCode::OK, "ready\n".to_string()),
            false => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n".to_string()),
        };
        if names {
            text.extend(draining.err().map(|fault| format!("{fault}\n")));
            text.extend(services.jobs.away().into_iter().map(|(job, fault)| format!("job {job}: {fault}\n")));
        }
        answer(status, TEXT, text)
    }

    /// Builds a response on a blocking thread, since it takes jobs' locks and must not stall network threads.
    async fn made(
        &self,
        content_type: &'static str,
        make: impl FnOnce(Services) -> String + Send + 'static,
    ) -> Response<Full<Bytes>> {
        let services = self.services.clone();
        // The semaphore is never closed.
        let permit = Arc::clone(&self.making).acquire_owned().await;
        let made = spawn_blocking(move || {
            let _permit = permit;
            make(services)
        });
        match made.await {
            Ok(text) => answer(StatusCode::OK, content_type, text),
            Err(error) => {
                tracing::error!(%error, "an HTTP answer was not made");
                answer(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "see the server's log; this is a defect\n")
            }
        }
    }
}

/// Answers a request that asks for another name than this server's.
pub(super) fn misdirected(why: String) -> Response<Full<Bytes>> {
    answer(StatusCode::MISDIRECTED_REQUEST, TEXT, why)
}

/// Answers a request without TLS on an address that speaks TLS alone.
pub(super) fn unencrypted() -> Response<Full<Bytes>> {
    answer(StatusCode::BAD_REQUEST, TEXT, "this address speaks TLS: ask https://\n")
}

/// Answers a refused reader. A browser that is offered Basic asks its user for name and password, and sends a token as
/// the password.
fn refusal(fault: &Fault) -> Response<Full<Bytes>> {
    if fault.kind != FaultKind::Unauthenticated {
        return answer(StatusCode::FORBIDDEN, TEXT, format!("{fault}\n"));
    }
    let mut answer = answer(StatusCode::UNAUTHORIZED, TEXT, format!("{fault}\n"));
    for scheme in ["Bearer", "Basic realm=\"longshore\", charset=\"UTF-8\""] {
        answer.headers_mut().append(WWW_AUTHENTICATE, HeaderValue::from_static(scheme));
    }
    answer
}

fn answer(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    answer
}
