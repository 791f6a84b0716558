//! Connections to the HTTP address, with limits on their number and lifetime, and the names that it answers to.

use std::{convert::Infallible, fs, net::IpAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, Request, Response, Uri,
    header::{ACCEPT, HOST},
};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use longshore_proto::{Fault, limits::HANDSHAKE_DEADLINE};
use longshore_wire::tls::Reader;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    task::{JoinSet, yield_now},
    time::{sleep, timeout},
};

use super::{
    answers::{self, Answers},
    report::Listen,
};
use crate::{accept::Accept, log::Seldom, places::Places, service::Services, trust::Readers};

/// Largest number of connections at once. A further connection ends the oldest of the origin with most connections, so
/// a flood does not block probes.
const MOST: usize = 32;
/// Longest wait for a request's headers, and for the next request of a connection.
const HEADERS: Duration = Duration::from_secs(10);
/// Longest life of a connection. A response in progress may then finish within `GRACE`.
const LIFE: Duration = Duration::from_secs(60);
const GRACE: Duration = Duration::from_secs(5);
/// Memory of a connection's headers. With [`MOST`] connections this is 1 MiB; browsers send less than 8 KiB.
const HEADER_BYTES: usize = 32 * 1024;
/// Pause after a failed accept.
const PAUSE: Duration = Duration::from_millis(100);
/// First byte of a TLS handshake record.
const TLS_HANDSHAKE: u8 = 0x16;

/// Serves the HTTP address until the future is dropped.
pub(crate) async fn serve(
    mut listener: TcpListener,
    services: Services,
    listen: Listen,
    readers: Option<Readers>,
    names: &[String],
) -> Infallible {
    let (answers, readers) = (Arc::new(Answers::new(services, listen)), Arc::new(readers));
    let hosts = Arc::new(Hosts::new(names));
    let (mut places, full) = (Places::new(MOST), Seldom::default());
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(ended) = connections.join_next_with_id() => {
                places.give_back(ended.map_or_else(|error| error.id(), |(id, ())| id));
            }
            accepted = Accept::accept(&mut listener) => match accepted {
                Ok((socket, origin)) => {
                    let (answers, readers, hosts) = (Arc::clone(&answers), Arc::clone(&readers), Arc::clone(&hosts));
                    let task = connections.spawn(async move { answer(socket, &answers, readers.as_ref().as_ref(), &hosts).await });
                    if places.take(origin, task) {
                        full.say(|| tracing::info!(most = MOST, "many HTTP connections at once: the oldest of the same origin are ended"));
                        yield_now().await;
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "no HTTP connection accepted");
                    sleep(PAUSE).await;
                }
            }
        }
    }
}

/// Serves one connection. `readers` None: plain HTTP for everyone. Some: TLS, and pages for these readers alone.
async fn answer(socket: TcpStream, answers: &Answers, readers: Option<&Readers>, hosts: &Hosts) {
    let Some(readers) = readers else {
        let answered = |request: Request<Incoming>| async move {
            match hosts.check(request.uri(), request.headers()) {
                Ok(()) => answered(answers, request, Ok(())).await,
                Err(why) => answers::misdirected(why),
            }
        };
        return speak(socket, answered).await;
    };
    // With TLS a browser checks the name by the certificate.
    let mut first = [0];
    // A port probe sends no byte and begins no handshake.
    match timeout(HANDSHAKE_DEADLINE, socket.peek(&mut first)).await {
        Ok(Ok(1..)) if first[0] != TLS_HANDSHAKE => {
            return speak(socket, |_| async { answers::unencrypted() }).await;
        }
        Ok(Ok(1..)) => {}
        _ => return,
    }
    // A failed handshake is not logged: TLS reports it to the reader.
    if let Ok(Ok(Reader { socket, certificate })) = timeout(HANDSHAKE_DEADLINE, readers.accept(socket)).await
    {
        let certificate = certificate.as_ref();
        let answered = |request: Request<Incoming>| {
            let admitted = readers.admit(certificate, request.headers());
            answered(answers, request, admitted)
        };
        speak(socket, answered).await;
    }
}

async fn answered(
    answers: &Answers,
    request: Request<Incoming>,
    admitted: Result<(), Fault>,
) -> Response<Full<Bytes>> {
    let accept = request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    answers.to(request.method(), request.uri(), accept, admitted).await
}

/// Speaks HTTP/1.1 until the connection's lifetime ends.
async fn speak<S, F>(socket: S, answered: impl Fn(Request<Incoming>) -> F)
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = Response<Full<Bytes>>>,
{
    let answered = &answered;
    let service = service_fn(|request| async move { Ok::<_, Infallible>(answered(request).await) });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS)
        .max_buf_size(HEADER_BYTES)
        .serve_connection(TokioIo::new(socket), service);
    let mut connection = std::pin::pin!(connection);
    // Errors of a reader's connection are not logged.
    if timeout(LIFE, connection.as_mut()).await.is_err() {
        connection.as_mut().graceful_shutdown();
        let _ = timeout(GRACE, connection).await;
    }
}

/// The host's own name.
const HOST_NAME: &str = "/proc/sys/kernel/hostname";
/// Number of characters of a refused name that the answer shows.
const SHOWN: usize = 80;

/// Names by which the HTTP address may be asked for. A page of the internet can have its own name resolve to this
/// address (DNS rebinding). Its script could then read the pages in a user's browser.
///
/// IP addresses and names without a dot are allowed too, since no public domain has such a name.
struct Hosts(Vec<String>);

impl Hosts {
    fn new(configured: &[String]) -> Hosts {
        let own = fs::read_to_string(HOST_NAME).unwrap_or_default().trim().to_string();
        Hosts(configured.iter().cloned().chain([own]).filter(|name| !name.is_empty()).collect())
    }

    /// Checks the names in a request.
    ///
    /// # Errors
    /// The text of the refusal, with the name.
    fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), String> {
        let in_headers =
            headers.get_all(HOST).iter().map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned());
        let mut all = in_headers.chain(uri.authority().map(ToString::to_string));
        match all.find(|host| !self.has(host)) {
            Some(host) => {
                let shown: String = host.chars().take(SHOWN).collect();
                Err(format!(
                    "host is {shown:?}, but must be an IP address, a name without a dot, or a name of this server: ask by its IP address, or start \
                     longshored with --http-host and this name\n"
                ))
            }
            None => Ok(()),
        }
    }

    /// `host` may have a port.
    fn has(&self, host: &str) -> bool {
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
            _ => host,
        };
        let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        let is_short = !name.is_empty()
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
        address.parse::<IpAddr>().is_ok()
            || is_short
            || self.0.iter().any(|known| known.eq_ignore_ascii_case(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_known_names_are_taken_and_no_others() {
        let hosts = Hosts::new(&["metrics.example.com".to_string()]);
        for good in
            ["127.0.0.1:7071", "10.0.0.7", "[::1]:7071", "localhost:7071", "host1", "metrics.example.com:1"]
        {
            assert!(hosts.has(good), "{good}");
        }
        for bad in [
            "",
            "evil.example.com:7071",
            "127.0.0.1.evil.com",
            "localhost.evil.com",
            "::1",
            "a b",
            "[::1].evil.com",
        ] {
            assert!(!hosts.has(bad), "{bad}");
        }
        let (uri, mut headers) = (Uri::from_static("/metrics"), HeaderMap::new());
        assert!(hosts.check(&uri, &headers).is_ok(), "HTTP/1.0 needs no name");
        headers.append(HOST, "localhost".parse().unwrap());
        headers.append(HOST, "evil.com".parse().unwrap());
        let said = hosts.check(&uri, &headers).unwrap_err();
        assert!(said.contains("host is \"evil.com\"") && said.contains("--http-host"), "{said}");
        assert!(hosts.check(&Uri::from_static("http://evil.com/"), &HeaderMap::new()).is_err());
    }
}
