//! A client of TLS that says anything: bytes in place of a handshake, and once hands are shaken records of any kind, sealed
//! as they should be or not, in any pieces. A server's end comes to an end, gives what was sealed for it and nothing else, sends
//! what it was told to send, and says little beside.

#![no_main]

use std::{
    fs, io,
    pin::Pin,
    sync::OnceLock,
    task::{Context, Poll, Waker},
};

use libfuzzer_sys::{
    arbitrary::{self, Arbitrary},
    fuzz_target,
};
use longshore_wire::{
    direct::Socket,
    tls::{Certificates, Credentials, Server, fuzzing},
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf, duplex};

const HOST: &str = "server.example";
/// More than any input makes either end say.
const PIPE_BYTES: usize = 1 << 22;
/// What the server's end may say beside data: an alert, and a new key whenever it is asked for one.
const MESSAGE_BYTES: usize = 27;

#[derive(Debug, Arbitrary)]
enum Input {
    /// Bytes in place of a handshake.
    Bytes(Vec<u8>),
    /// A handshake in which some bytes of the client's are others: where, and what they are combined with.
    Changed(Vec<(u16, u8)>),
    Records(Vec<Act>),
}

#[derive(Debug, Arbitrary)]
enum Act {
    /// So much data, in one record.
    Data(u16),
    /// Anything in a sealed record.
    Sealed(u8, Vec<u8>),
    /// A new key, with or without one wanted in return, said in so many pieces.
    NewKey {
        wanted: bool,
        apart: bool,
    },
    /// A ticket, which no client sends, or another message's head.
    Message(u8, u16),
    /// Bytes that nobody sealed.
    Raw(Vec<u8>),
    /// A sealed record of which a bit is wrong.
    Damaged(u16, u8),
    Close,
    /// The server writes so much data.
    Write(u16),
    /// The server reads once, into a place of this size.
    Read(u8),
}

/// A pipe's end that gives and takes some bytes with each call, by turns.
struct Cut {
    pipe: DuplexStream,
    cuts: Vec<u8>,
    turn: usize,
}

impl Cut {
    fn most(&mut self, bytes: usize) -> usize {
        self.turn += 1;
        let cut = self.cuts.get(self.turn % self.cuts.len().max(1)).copied();
        cut.map_or(bytes, |cut| bytes.min(1 + usize::from(cut) * usize::from(cut) / 2))
    }
}

impl Socket for Cut {}

impl AsyncRead for Cut {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let mut bytes = vec![0; this.most(out.remaining())];
        let mut part = ReadBuf::new(&mut bytes);
        let read = Pin::new(&mut this.pipe).poll_read(context, &mut part);
        out.put_slice(part.filled());
        read
    }
}

impl AsyncWrite for Cut {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let most = this.most(bytes.len());
        Pin::new(&mut this.pipe).poll_write(context, &bytes[..most])
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().pipe).poll_shutdown(context)
    }
}

/// The client's end of a pipe, in which the bytes that it writes may be changed.
struct Changed {
    pipe: DuplexStream,
    changes: Vec<(u16, u8)>,
    written: usize,
}

impl Socket for Changed {}

impl AsyncRead for Changed {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().pipe).poll_read(context, out)
    }
}

impl AsyncWrite for Changed {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let mut changed = bytes.to_vec();
        for &(at, with) in &this.changes {
            if let Some(byte) = usize::from(at).checked_sub(this.written).and_then(|at| changed.get_mut(at)) {
                *byte ^= with;
            }
        }
        let written = Pin::new(&mut this.pipe).poll_write(context, &changed);
        if let Poll::Ready(Ok(count)) = written {
            this.written += count;
        }
        written
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().pipe).poll_shutdown(context)
    }
}

/// Both ends' folders, made once.
fn ends() -> &'static (Server, Credentials) {
    static ENDS: OnceLock<(Server, Credentials)> = OnceLock::new();
    ENDS.get_or_init(|| {
        let dir = std::env::temp_dir().join(format!("longshore-tls-records-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        fs::write(dir.join("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        let authority = Issuer::new(params, key);
        let key = KeyPair::generate().unwrap();
        let server = CertificateParams::new(vec![HOST.to_string()]).unwrap();
        fs::write(dir.join("server.pem"), server.signed_by(&key, &authority).unwrap().pem()).unwrap();
        fs::write(dir.join("server.key"), key.serialize_pem()).unwrap();
        fs::write(dir.join("token"), "token").unwrap();
        let server = Server::read(&dir, Certificates::Optional).unwrap();
        (server, Credentials::read(&dir).unwrap())
    })
}

/// Drives a future whose wakers nobody needs: what it waits for is in a pipe, or never comes.
fn drive<T>(mut future: Pin<&mut impl Future<Output = T>>, turns: usize) -> Option<T> {
    let mut context = Context::from_waker(Waker::noop());
    (0..turns).find_map(|_| match future.as_mut().poll(&mut context) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    })
}

/// Bytes that differ from place to place.
fn pattern(from: usize, bytes: usize) -> Vec<u8> {
    (from..from + bytes).map(|at| (at * 31 + at / 251) as u8).collect()
}

fn push(pipe: &mut DuplexStream, bytes: &[u8]) {
    let mut context = Context::from_waker(Waker::noop());
    let mut rest = bytes;
    while let Poll::Ready(Ok(count)) = Pin::new(&mut *pipe).poll_write(&mut context, rest) {
        rest = &rest[count..];
        if rest.is_empty() {
            return;
        }
    }
}

fn drain(pipe: &mut DuplexStream) -> Vec<u8> {
    let (mut context, mut all) = (Context::from_waker(Waker::noop()), Vec::new());
    loop {
        let mut place = [0; 4096];
        let mut out = ReadBuf::new(&mut place);
        match Pin::new(&mut *pipe).poll_read(&mut context, &mut out) {
            Poll::Ready(Ok(())) if !out.filled().is_empty() => all.extend_from_slice(out.filled()),
            _ => return all,
        }
    }
}

/// Reads once, into a place of this size.
fn read(mut stream: Pin<&mut impl AsyncRead>, came: &mut Vec<u8>, most: usize) -> Poll<io::Result<usize>> {
    let mut place = vec![0; most];
    let mut out = ReadBuf::new(&mut place);
    let read = stream.as_mut().poll_read(&mut Context::from_waker(Waker::noop()), &mut out);
    came.extend_from_slice(out.filled());
    read.map_ok(|()| out.filled().len())
}

/// A handshake with a client that is none, or whose bytes are changed on their way.
fn shake(bytes: Option<Vec<u8>>, changes: Vec<(u16, u8)>, cuts: Vec<u8>) {
    let (server, credentials) = ends();
    let (mine, theirs) = duplex(PIPE_BYTES);
    let mut served = Box::pin(fuzzing::accept(server, Cut { pipe: mine, cuts, turn: 0 }));
    let Some(bytes) = bytes else {
        let mut client = Box::pin(fuzzing::Client::connect(
            credentials,
            Changed { pipe: theirs, changes: changes.clone(), written: 0 },
            HOST,
        ));
        let (mut ours, mut other) = (None, None);
        for _ in 0..20_000 {
            ours = ours.or_else(|| drive(served.as_mut(), 1));
            other = other.or_else(|| drive(client.as_mut(), 1));
            if let Some(other) = &other
                && (ours.is_some() || other.is_err())
            {
                break;
            }
        }
        let whole = changes.iter().all(|&(_, with)| with == 0);
        let shaken = matches!((&ours, &other), (Some(Ok(_)), Some(Ok(_))));
        assert!(shaken || !whole, "a handshake that nobody changed has failed");
        return;
    };
    let mut pipe = theirs;
    push(&mut pipe, &bytes);
    let turns = 8 * bytes.len() + 64;
    let told = drive(served.as_mut(), turns).or_else(|| {
        drop(pipe);
        drive(served.as_mut(), turns)
    });
    assert!(told.is_some_and(|told| told.is_err()), "no hands were shaken");
}

/// What a client says once hands are shaken.
fn say(acts: &[Act], cuts: Vec<u8>) {
    let (server, credentials) = ends();
    let (mine, theirs) = duplex(PIPE_BYTES);
    let socket = Cut { pipe: mine, cuts, turn: 0 };
    let mut served = Box::pin(fuzzing::accept(server, socket));
    let unchanged = Changed { pipe: theirs, changes: Vec::new(), written: 0 };
    let mut client = Box::pin(fuzzing::Client::connect(credentials, unchanged, HOST));
    let (mut ours, mut other) = (None, None);
    while ours.is_none() || other.is_none() {
        ours = ours.or_else(|| drive(served.as_mut(), 1));
        other = other.or_else(|| drive(client.as_mut(), 1));
    }
    let (mut stream, mut client) = (ours.unwrap().unwrap(), other.unwrap().unwrap());
    let mut context = Context::from_waker(Waker::noop());
    // What was sealed as data, what came of it, and whether anything was said that ends the connection, or may.
    let (mut sealed, mut came, mut hostile) = (Vec::new(), Vec::new(), false);
    let (mut wrote, mut failed, mut over) = (0, false, false);
    let mut stream = Pin::new(&mut stream);
    for act in acts {
        match act {
            Act::Data(bytes) => {
                let content = pattern(sealed.len(), usize::from(*bytes) % 16_385);
                hostile |= content.is_empty();
                let record = client.seal(23, &content);
                sealed.extend_from_slice(&content);
                push(&mut client.socket().pipe, &record);
            }
            Act::Sealed(kind, content) => {
                hostile = true;
                let content = &content[..content.len().min(16_384)];
                // Zeros behind a record's type are padding (RFC 8446, 5.4), and so is a type of zero.
                let whole = [content, &[*kind]].concat();
                let end = whole.iter().rposition(|&byte| byte != 0);
                if let Some(end) = end.filter(|&end| whole[end] == 23) {
                    sealed.extend_from_slice(&whole[..end]);
                }
                let record = client.seal(*kind, content);
                push(&mut client.socket().pipe, &record);
            }
            Act::NewKey { wanted, apart } => {
                // So many of them in a row are refused.
                hostile = true;
                let message = [24, 0, 0, 1, u8::from(*wanted)];
                for part in message.chunks(if *apart { 2 } else { 5 }) {
                    let record = client.seal(22, part);
                    push(&mut client.socket().pipe, &record);
                }
                client.take_next_key();
            }
            Act::Message(kind, bytes) => {
                hostile = true;
                let [high, low] = bytes.to_be_bytes();
                let record = client.seal(22, &[*kind, 0, high, low, 0]);
                push(&mut client.socket().pipe, &record);
            }
            Act::Raw(bytes) => {
                hostile = true;
                push(&mut client.socket().pipe, bytes);
            }
            Act::Damaged(at, with) => {
                hostile = true;
                let mut record = client.seal(23, &pattern(0, 40));
                // The second byte of the version counts for nothing (RFC 8446, 5.1).
                let at = Some(usize::from(*at) % record.len()).filter(|&at| at != 2).unwrap_or(1);
                record[at] ^= with.max(&1);
                push(&mut client.socket().pipe, &record);
            }
            Act::Close => {
                hostile = true;
                let record = client.seal(21, &[1, 0]);
                push(&mut client.socket().pipe, &record);
            }
            Act::Write(bytes) => {
                let data = pattern(wrote, usize::from(*bytes));
                if let Poll::Ready(Ok(count)) = stream.as_mut().poll_write(&mut context, &data) {
                    assert!(!failed || count == 0, "it takes data after a failure");
                    wrote += count;
                }
            }
            Act::Read(most) => {
                if let Poll::Ready(done) = read(stream.as_mut(), &mut came, 1 + usize::from(*most) * 67) {
                    assert!(!failed || done.is_err(), "a failure must stay");
                    (failed, over) = (done.is_err(), over || matches!(done, Ok(0)));
                }
            }
        }
    }
    // Nothing more comes.
    let record = client.seal(21, &[1, 0]);
    push(&mut client.socket().pipe, &record);
    _ = Pin::new(&mut client.socket().pipe).poll_shutdown(&mut context);
    for turn in 0.. {
        match read(stream.as_mut(), &mut came, 4096) {
            Poll::Ready(Ok(0)) => {
                over = true;
                break;
            }
            Poll::Ready(Err(_)) => {
                failed = true;
                break;
            }
            _ => assert!(turn < 2 * PIPE_BYTES, "it never comes to an end"),
        }
    }
    assert!(sealed.starts_with(&came), "it gives what nobody sealed");
    assert!(hostile || came.len() == sealed.len(), "{} of {} bytes came", came.len(), sealed.len());
    assert!(over || failed);
    for _ in 0..PIPE_BYTES {
        if stream.as_mut().poll_flush(&mut context).is_ready() {
            break;
        }
    }
    let sent = drain(&mut client.socket().pipe);
    let mut data = Vec::new();
    client.open(&sent, &mut data).expect("what a server seals can be opened");
    assert_eq!(data, pattern(0, wrote), "it sends something else");
    let records = wrote.div_ceil(1 << 14) + acts.len();
    assert!(
        sent.len() <= wrote + (records + acts.len() + 2) * (22 + MESSAGE_BYTES),
        "{} bytes said",
        sent.len()
    );
}

fuzz_target!(|input: (Vec<u8>, Input)| {
    let (cuts, input) = input;
    match input {
        Input::Bytes(bytes) => shake(Some(bytes), Vec::new(), cuts),
        Input::Changed(changes) => shake(None, changes, cuts),
        Input::Records(acts) => say(&acts[..acts.len().min(64)], cuts),
    }
});
