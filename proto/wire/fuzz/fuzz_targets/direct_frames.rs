//! Feeds any bytes to a connection, in any pieces and with any sink. The connection must end and must add no bytes. If
//! no stream is tapped, h2 gets all bytes. The connection may be cut off only for frames of a wrong size, endless
//! headers, or bytes beyond the window.

#![no_main]

use std::{
    io::{self, IoSliceMut},
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use longshore_wire::{
    direct::{Direct, Mark, Side, Socket, Taps},
    frame::encode,
    sink::{Mode, Read, Sink},
    v1::PushRequest,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADER_BYTES: usize = 9;
const WINDOW: usize = 2048;

/// Sizes of pieces that repeat without an end, as the fuzzer's bytes say.
struct Cuts(Vec<u8>, usize);

impl Cuts {
    fn next(&mut self) -> usize {
        self.1 += 1;
        match self.0.get(self.1 % self.0.len().max(1)) {
            Some(&cut) if cut >= 128 => usize::from(cut - 127) * 131,
            // Every seventh turn adds 1, so that sizes of 0 alone cannot stop all progress.
            Some(&cut) => usize::from(cut) + usize::from(self.1 % 7 == 0),
            None => 4096,
        }
    }
}

struct Script {
    incoming: Vec<u8>,
    at: Mutex<(usize, Cuts)>,
}

impl Socket for Script {
    fn poll_read_into(
        &mut self,
        _: &mut Context<'_>,
        places: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        let (at, cuts) = &mut *self.at.lock().unwrap();
        let mut left = cuts.next().min(self.incoming.len() - *at);
        if left == 0 && *at < self.incoming.len() {
            return Poll::Pending;
        }
        let before = *at;
        for place in places {
            let now = left.min(place.len());
            place[..now].copy_from_slice(&self.incoming[*at..*at + now]);
            (*at, left) = (*at + now, left - now);
        }
        Poll::Ready(Ok(*at - before))
    }
}

impl AsyncRead for Script {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        unreachable!("it is read with poll_read_into")
    }
}

impl AsyncWrite for Script {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[derive(Clone)]
struct Count(Arc<Mutex<(usize, Cuts)>>);

impl Count {
    fn got(&self) -> usize {
        self.0.lock().unwrap().0
    }
}

impl Sink for Count {
    fn mode(&mut self) -> Mode {
        let cuts = &self.0.lock().unwrap().1;
        match cuts.0.get(cuts.1 % cuts.0.len().max(1)) {
            Some(mode) if mode % 4 == 0 => Mode::Payload,
            Some(mode) if mode % 4 == 1 => Mode::Stalled,
            Some(mode) if mode % 4 == 2 => Mode::Direct(usize::from(*mode) * 40 + 1),
            _ => Mode::Fields,
        }
    }

    fn put(&mut self, bytes: &mut Bytes) {
        let mut held = self.0.lock().unwrap();
        held.0 += bytes.len();
        held.1.1 += 1;
        bytes.clear();
    }

    fn read(&mut self, most: usize, read: &mut Read<'_>) -> io::Result<usize> {
        let Mode::Direct(payload) = self.mode() else { panic!("it did not ask for this") };
        let mut place = vec![0; payload.min(most)];
        let count = read(&mut place)?;
        assert!(count <= place.len());
        let mut held = self.0.lock().unwrap();
        held.0 += count;
        held.1.1 += 1;
        Ok(count)
    }
}

/// Returns a connection's bytes: the preface, then stream 1 with `mark` if there is one, then `rest`.
fn connection(mark: Option<Mark>, rest: &[u8]) -> Vec<u8> {
    let mut bytes = PREFACE.to_vec();
    if let Some(mark) = mark {
        let message = mark.put(encode(&PushRequest { job: "j".into(), ..PushRequest::default() })).head;
        bytes.extend_from_slice(&(message.len() as u32).to_be_bytes()[1..]);
        bytes.extend_from_slice(&[0, 0, 0, 0, 0, 1]);
        bytes.extend_from_slice(&message);
    }
    bytes.extend_from_slice(rest);
    bytes
}

fuzz_target!(|input: (bool, u8, Vec<u8>, Vec<u8>, &[u8])| {
    let (marked, drop_at, cuts, modes, rest) = input;
    let mark = Mark::of_request();
    let incoming = connection(marked.then_some(mark), rest);
    // Even without the marked stream, `rest` may begin streams with marks.
    let begun = marked || rest.windows(8).any(|bytes| bytes == b"ls-push\0");
    let taps = Taps::default();
    let script = Script { incoming: incoming.clone(), at: Mutex::new((0, Cuts(cuts.clone(), 0))) };
    let mut direct = Direct::new(script, Side::Server, WINDOW, taps.clone());
    let sink = Count(Arc::new(Mutex::new((0, Cuts(modes, 0)))));
    let (mut claim, mut passed, mut room) = (None, Vec::new(), Cuts(cuts, 3));
    let mut context = Context::from_waker(Waker::noop());
    let (mut over, mut cut_off) = (false, false);
    // The loop ends even if each byte is waited for a few times.
    for turn in 0..1000 + 64 * incoming.len() {
        let mut place = vec![0; room.next().max(1)];
        let mut out = ReadBuf::new(&mut place);
        match Pin::new(&mut direct).poll_read(&mut context, &mut out) {
            Poll::Ready(Ok(())) if out.filled().is_empty() => {
                over = true;
                break;
            }
            Poll::Ready(Ok(())) => passed.extend_from_slice(out.filled()),
            // The peer sent frames that HTTP/2 forbids. The connection is cut off, and h2 has all bytes that came
            // before.
            Poll::Ready(Err(error)) => {
                assert!(error.to_string().starts_with("the peer "), "{error}");
                cut_off = true;
                break;
            }
            Poll::Pending => {}
        }
        claim = claim.or_else(|| {
            let claim = taps.claim(mark)?;
            claim.install(Box::new(sink.clone()));
            Some(claim)
        });
        if drop_at > 0 && turn > usize::from(drop_at) {
            // Bytes that arrive from now on have no sink.
            drop(claim.take());
        }
        let stalled = sink.clone().mode() == Mode::Stalled;
        if stalled {
            sink.0.lock().unwrap().1.1 += 1;
        }
        claim.iter().for_each(|claim| claim.resume());
    }
    assert!(over || cut_off, "it never came to an end");
    if cut_off && !begun {
        assert!(incoming.starts_with(&passed));
    } else if begun {
        // The last bytes of a stream may be replaced by an empty frame, which adds a header.
        assert!(passed.len() + sink.got() <= incoming.len() + HEADER_BYTES);
    } else {
        assert_eq!((sink.got(), &passed), (0, &incoming));
    }
});
