//! A socket that changes every byte lies between HTTP/2 and the pipe below, as TLS would. `impl Socket` is
//! all that such a socket needs.

use std::{
    future::{Ready, ready},
    io,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, ready as whole},
    time::Duration,
};

use bytes::Bytes;
use http::Uri;
use hyper_util::rt::TokioIo;
use longshore_proto::Fault;
use longshore_wire::{
    direct::{Bounds, Direct, Mark, Side, Socket, Taps},
    frame::{self, PULL, SharedIntake},
    sink::{MessageSink, Mode, Read, Sink},
    v1::{PullResponse, tensors_server::TensorsServer},
};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf, duplex};
use tokio_stream::StreamExt;
use tonic::transport::{Channel, Endpoint, Server};
use tower_service::Service;

use crate::{echo::Echo, request};

const KEY: u8 = 0x5A;
const WINDOW: u32 = 1 << 20;

/// A socket that changes every byte, as encryption would.
struct Xor {
    pipe: DuplexStream,
    /// Number of bytes read and changed back.
    read: Arc<AtomicUsize>,
}

impl Socket for Xor {}

impl AsyncRead for Xor {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = out.filled().len();
        whole!(Pin::new(&mut self.pipe).poll_read(context, out))?;
        let new = &mut out.filled_mut()[before..];
        new.iter_mut().for_each(|byte| *byte ^= KEY);
        self.read.fetch_add(new.len(), Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Xor {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let changed: Vec<u8> = bytes.iter().map(|byte| byte ^ KEY).collect();
        Pin::new(&mut self.pipe).poll_write(context, &changed)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_shutdown(context)
    }
}

/// A connector that hands out one existing connection.
struct Once(Mutex<Option<Direct<Xor>>>);

impl Service<Uri> for Once {
    type Response = TokioIo<Direct<Xor>>;
    type Error = io::Error;
    type Future = Ready<io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let socket = self.0.lock().unwrap().take();
        ready(socket.map(TokioIo::new).ok_or_else(|| io::ErrorKind::NotConnected.into()))
    }
}

/// Collects payloads, and counts their bytes that bypassed h2.
#[derive(Default)]
struct Collect {
    heads: Vec<(u32, usize)>,
    payload: Vec<u8>,
    direct: usize,
}

impl Sink for Collect {
    fn mode(&mut self) -> Mode {
        Mode::Direct(usize::MAX)
    }

    fn put(&mut self, bytes: &mut Bytes) {
        self.payload.extend_from_slice(&std::mem::take(bytes));
    }

    fn read(&mut self, most: usize, read: &mut Read<'_>) -> io::Result<usize> {
        let mut place = vec![0; most];
        let count = read(&mut place)?;
        self.payload.extend_from_slice(&place[..count]);
        self.direct += count;
        Ok(count)
    }
}

impl MessageSink<PullResponse> for Collect {
    fn begin(&mut self, head: PullResponse, bytes: usize) -> Result<bool, Fault> {
        self.heads.push((head.shard, bytes));
        Ok(true)
    }

    fn end(&mut self) -> Result<bool, Fault> {
        Ok(false)
    }
}

async fn connect(taps: &Taps, read: &Arc<AtomicUsize>) -> Channel {
    let (near, far) = duplex(64 * 1024);
    let (near, far) = (Xor { pipe: near, read: Arc::clone(read) }, Xor { pipe: far, read: Arc::default() });
    let (served, _standing) = Direct::serve(far, &Arc::new(Bounds::default()), None);
    let incoming = tokio_stream::once(Ok::<_, io::Error>(served)).chain(tokio_stream::pending());
    tokio::spawn(Server::builder().add_service(TensorsServer::new(Echo)).serve_with_incoming(incoming));
    let dialled = Direct::new(near, Side::Client, WINDOW as usize, taps.clone());
    Endpoint::from_static("http://pipe")
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .connect_with_connector(Once(Mutex::new(Some(dialled))))
        .await
        .unwrap()
}

async fn pull() {
    let (taps, read) = (Taps::default(), Arc::default());
    let mut channel = connect(&taps, &read).await;
    let mark = Mark::of_answer();
    let sink = SharedIntake::new(Collect::default());
    let claim = taps.expect(mark, Box::new(sink.clone()));
    let marked = mark.put(frame::encode(&request("echo", 1)));
    let answers = frame::call_once(&mut channel, PULL, marked).await.unwrap();
    answers.pour(&sink).await.unwrap();
    sink.lock().finish().unwrap();
    drop(claim);
    let collected = &sink.lock().sink;
    assert_eq!(collected.heads, [(3, 300_000), (5, 500_000)]);
    assert!(collected.payload == [vec![3; 300_000], vec![5; 500_000]].concat());
    assert!(collected.direct > 400_000, "{} bytes came past h2", collected.direct);
    assert!(read.load(Relaxed) > 800_000);
}

#[tokio::test]
async fn a_stream_of_ones_own_carries_payloads_past_http2() {
    tokio::time::timeout(Duration::from_secs(20), pull()).await.unwrap();
}
