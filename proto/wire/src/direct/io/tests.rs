//! Arbitrary frames, with arbitrary cuts of reads and writes. Checked are the bytes that h2 and the sinks get, and the
//! windows returned.

use std::{collections::VecDeque, io::Read as _, task::Waker};

use bytes::Bytes;
use longshore_memory::{Part, SharedFile, write_parts};
use proptest::prelude::*;

use super::*;
use crate::{
    direct::{Claim, Payloads, blank, outward::HEADER_BYTES},
    frame::{Piece, encode},
    sink::{Mode, Read, Sink},
    v1::PushRequest,
};

/// A socket that reads and writes scripted numbers of bytes at a time.
struct Script {
    incoming: Vec<u8>,
    at: Mutex<(usize, VecDeque<usize>)>,
    outgoing: Vec<u8>,
    accepts: VecDeque<usize>,
}

fn next(cuts: &mut VecDeque<usize>) -> usize {
    cuts.rotate_left(1);
    cuts[0]
}

impl Script {
    fn new(incoming: Vec<u8>, cuts: &[usize]) -> Script {
        let cuts: VecDeque<usize> = cuts.iter().copied().collect();
        Script { incoming, at: Mutex::new((0, cuts.clone())), outgoing: Vec::new(), accepts: cuts }
    }

    fn is_read(&self) -> bool {
        self.at.lock().unwrap().0 == self.incoming.len()
    }
}

impl Socket for Script {
    fn poll_read_into(
        &mut self,
        _: &mut Context<'_>,
        places: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut held = self.at.lock().unwrap();
        let (at, cuts) = &mut *held;
        let cut = next(cuts);
        if cut == 0 && *at < self.incoming.len() {
            // The test polls again after Pending.
            return Poll::Pending;
        }
        let mut left = cut.min(self.incoming.len() - *at);
        let mut count = 0;
        for place in places {
            let now = left.min(place.len());
            place[..now].copy_from_slice(&self.incoming[*at..*at + now]);
            (*at, left, count) = (*at + now, left - now, count + now);
        }
        Poll::Ready(Ok(count))
    }

    fn takes_addresses(&self) -> bool {
        true
    }

    fn poll_write_parts(&mut self, _: &mut Context<'_>, parts: &[Part<'_>]) -> Poll<io::Result<usize>> {
        let mut left = next(&mut self.accepts);
        if left == 0 {
            return Poll::Pending;
        }
        // The kernel reads memory that safe code cannot.
        let (mut reader, writer) = io::pipe()?;
        for part in parts {
            let now = left.min(part.len());
            left -= now;
            let part = match part {
                Part::Own(bytes) => Part::Own(&bytes[..now]),
                Part::Shared(bytes) => Part::Shared(bytes.slice(0..now)),
            };
            assert_eq!(write_parts(&writer, &[part])?, now);
        }
        drop(writer);
        Poll::Ready(reader.read_to_end(&mut self.outgoing))
    }
}

impl AsyncRead for Script {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        unreachable!("it is read with poll_read_into")
    }
}

impl AsyncWrite for Script {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let now = next(&mut self.accepts).min(bytes.len());
        if now == 0 {
            return Poll::Pending;
        }
        self.outgoing.extend_from_slice(&bytes[..now]);
        Poll::Ready(Ok(now))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A sink that takes bytes in one mode after another.
#[derive(Clone)]
struct Collect(Arc<Mutex<Collected>>);

struct Collected {
    got: Vec<u8>,
    modes: VecDeque<Mode>,
    stalls: usize,
}

impl Collect {
    fn new(modes: &[Mode]) -> Collect {
        Collect(Arc::new(Mutex::new(Collected {
            got: Vec::new(),
            modes: modes.iter().copied().collect(),
            stalls: 0,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Collected> {
        lock(&self.0)
    }

    fn unstall(&self) {
        let mut held = self.lock();
        if held.modes[0] == Mode::Stalled {
            held.modes.rotate_left(1);
            held.stalls += 1;
        }
    }
}

impl Sink for Collect {
    fn mode(&mut self) -> Mode {
        self.lock().modes[0]
    }

    fn put(&mut self, bytes: &mut Bytes) {
        let mut held = self.lock();
        while !bytes.is_empty() && held.modes[0] != Mode::Stalled {
            // Just before a stall the sink takes only a part.
            let part = if held.modes[1] == Mode::Stalled { bytes.len().div_ceil(2) } else { bytes.len() };
            held.got.extend_from_slice(&bytes.split_to(part));
            held.modes.rotate_left(1);
        }
    }

    fn read(&mut self, most: usize, read: &mut Read<'_>) -> io::Result<usize> {
        let mut held = self.lock();
        let Mode::Direct(payload) = held.modes[0] else { panic!("it did not ask for this") };
        let mut place = vec![0; payload.min(most)];
        let count = read(&mut place)?;
        held.got.extend_from_slice(&place[..count]);
        held.modes.rotate_left(1);
        Ok(count)
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    [&Header { len: payload.len(), kind, flags, stream }.write()[..], payload].concat()
}

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 31 + seed * 7) as u8).collect()
}

fn marked(mark: Mark) -> Vec<u8> {
    let Piece { head, .. } = mark.put(encode(&PushRequest { job: "j".into(), ..PushRequest::default() }));
    head.to_vec()
}

/// A peer's frame: kind, one of three streams, length, and padding.
type Sent = (u8, usize, usize, Option<u8>);

/// The bytes of a connection, and their expected destinations.
#[derive(Default)]
struct Expected {
    sent: Vec<u8>,
    passed: Vec<u8>,
    /// For each stream: its sink's bytes, and the window taken.
    diverted: [(Vec<u8>, usize); 2],
    ended: [bool; 2],
}

/// Streams 1 and 3 are tapped, and stream 5 is not. `marks` has the marks of incoming requests. None on a client, whose
/// requests have gone out.
fn expected(frames: &[Sent], marks: Option<[Mark; 2]>) -> Expected {
    let mut expected = Expected::default();
    if marks.is_some() {
        expected.sent.extend_from_slice(PREFACE);
        expected.passed.extend_from_slice(PREFACE);
    }
    let mut begun = [marks.is_none(); 2];
    for (index, &(kind, which, len, padding)) in frames.iter().enumerate() {
        let stream = 2 * which as u32 + 1;
        let payload = bytes(len, index);
        let pass = |frame: Vec<u8>, expected: &mut Expected| {
            expected.sent.extend_from_slice(&frame);
            expected.passed.extend_from_slice(&frame);
        };
        if kind > 3 {
            // This frame's kind allows any size.
            pass(frame(kind + 16, 0, stream, &payload), &mut expected);
        } else if which == 2 {
            pass(frame(Header::DATA, 0, stream, &payload), &mut expected);
        } else if !begun[which] {
            begun[which] = true;
            let mark = marks.unwrap()[which];
            pass(frame(Header::DATA, 0, stream, &[marked(mark), payload].concat()), &mut expected);
        } else if !expected.ended[which] {
            let end = kind == 0;
            let flags = if end { Header::END_STREAM } else { 0 };
            let body = match padding {
                Some(padding) => [&[padding][..], &payload, &bytes(padding.into(), 9)].concat(),
                None => payload.clone(),
            };
            let flags = flags | if padding.is_some() { Header::PADDED } else { 0 };
            expected.sent.extend_from_slice(&frame(Header::DATA, flags, stream, &body));
            expected.diverted[which].0.extend_from_slice(&payload);
            expected.diverted[which].1 += body.len();
            if end {
                expected.ended[which] = true;
                expected.passed.extend_from_slice(&frame(Header::DATA, Header::END_STREAM, stream, &[]));
            }
        }
    }
    expected
}

fn modes() -> impl Strategy<Value = Vec<Mode>> {
    let mode = prop_oneof![
        Just(Mode::Fields),
        Just(Mode::Payload),
        Just(Mode::Stalled),
        (1usize..5000).prop_map(Mode::Direct),
    ];
    prop::collection::vec(mode, 2..8).prop_map(|mut modes| {
        modes.push(Mode::Fields);
        modes
    })
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    let cut = prop_oneof![Just(0usize), 1usize..12, 1usize..600, 1usize..9000];
    prop::collection::vec(cut, 1..20).prop_map(|mut cuts| {
        cuts.push(40);
        cuts
    })
}

fn sent() -> impl Strategy<Value = Vec<Sent>> {
    let len = prop_oneof![Just(0usize), 1usize..60, 1usize..4000];
    let frame = (0u8..8, 0usize..3, len, prop::option::weighted(0.2, any::<u8>()));
    prop::collection::vec(frame, 1..40)
}

/// The frames that h2 writes. None is a WINDOW_UPDATE, so that `Direct`'s own can be told apart.
fn written(lens: &[usize]) -> Vec<Vec<u8>> {
    lens.iter().enumerate().map(|(index, &len)| frame(4, 0, 7, &bytes(len, index))).collect()
}

struct Run {
    direct: Direct<Script>,
    passed: Vec<u8>,
    room: VecDeque<usize>,
    /// Bytes that h2 still writes, and their cuts.
    writing: Vec<u8>,
    slices: VecDeque<usize>,
}

impl Run {
    fn new(side: Side, incoming: Vec<u8>, writing: Vec<u8>, cuts: &[usize]) -> Run {
        let socket = Script::new(incoming, cuts);
        let mut direct = Direct::new(socket, side, 1 << 20, Taps::default());
        direct.credit.step = 1000;
        direct.conduct.window = 1 << 20;
        let sizes: VecDeque<usize> = cuts.iter().map(|cut| cut + 1).collect();
        Run { direct, passed: Vec::new(), room: sizes.clone(), writing, slices: sizes }
    }

    /// Runs one turn of h2. Returns true at the end of the stream.
    fn turn(&mut self) -> io::Result<bool> {
        let mut context = Context::from_waker(Waker::noop());
        let (a, b) = (next(&mut self.slices).min(self.writing.len()), next(&mut self.slices));
        let b = (a + b).min(self.writing.len());
        if b > 0 {
            let slices = [IoSlice::new(&self.writing[..a]), IoSlice::new(&self.writing[a..b])];
            if let Poll::Ready(count) = Pin::new(&mut self.direct).poll_write_vectored(&mut context, &slices)
            {
                self.writing.drain(..count?);
            }
        }
        let mut place = vec![0; next(&mut self.room) * 8];
        let mut out = ReadBuf::new(&mut place);
        match Pin::new(&mut self.direct).poll_read(&mut context, &mut out) {
            Poll::Ready(read) => {
                read?;
                self.passed.extend_from_slice(out.filled());
                Ok(out.filled().is_empty() && self.direct.socket.is_read())
            }
            Poll::Pending => Ok(false),
        }
    }

    /// Splits the output into h2's frames and the windows returned for a stream.
    fn outgoing(&self, from: usize) -> (Vec<u8>, impl Fn(u32) -> usize) {
        let (mut rest, mut own, mut updates) = (&self.direct.socket.outgoing[from..], Vec::new(), Vec::new());
        while !rest.is_empty() {
            let header = Header::read(rest.first_chunk().unwrap());
            let (whole, later) = rest.split_at(HEADER_BYTES + header.len);
            match header.kind {
                Header::WINDOW_UPDATE => {
                    let bytes = u32::from_be_bytes(whole[HEADER_BYTES..].try_into().unwrap());
                    updates.push((header.stream, bytes as usize));
                }
                _ => own.extend_from_slice(whole),
            }
            rest = later;
        }
        (own, move |stream| {
            updates.iter().filter(|(id, _)| *id == stream).map(|(_, bytes)| bytes).sum::<usize>()
        })
    }

    fn check(&self, expected: &Expected, sinks: &[Collect; 2], from: usize, own: &[u8]) {
        assert_eq!(self.passed, expected.passed, "what h2 got");
        let mut taken = 0;
        let (written, given_back) = self.outgoing(from);
        assert_eq!(written, own, "what h2 wrote");
        for (which, (payload, window)) in expected.diverted.iter().enumerate() {
            assert_eq!(&sinks[which].lock().got, payload, "what sink {which} got");
            taken += window;
            let id = 2 * which as u32 + 1;
            let owed =
                self.direct.streams.iter().find(|stream| stream.id == id).map_or(0, |stream| stream.owed);
            let back = given_back(id) + owed;
            assert!(back == *window || expected.ended[which], "{back} of stream {id}'s {window}");
        }
        assert_eq!(given_back(0) + self.direct.credit.owed, taken);
        assert!(!self.direct.credit.is_due());
    }
}

/// An answer's messages, some with a payload that bypasses h2: the bytes for h2, and the bytes that must arrive.
fn answer(lens: &[(usize, usize)], payloads: &mut Payloads) -> (Vec<u8>, Vec<u8>) {
    let (mut given, mut wanted) = (Vec::new(), Vec::new());
    for (index, &(head, payload)) in lens.iter().enumerate() {
        let head = Bytes::from(bytes(head, index));
        let body = bytes(payload, index + 1);
        let (mut region, _) = SharedFile::lendable(payload.max(1)).unwrap();
        region.bytes_mut()[..payload].copy_from_slice(&body);
        let shared = (payload > 0).then(|| region.share(0..payload));
        // Some messages have a payload of their own.
        let shared = shared.filter(|_| index % 3 < 2);
        let own = shared.as_ref().map_or_else(|| Bytes::from(body.clone()), blank);
        given.extend_from_slice(&[&head[..], &own].concat());
        wanted.extend_from_slice(&[&head[..], &body].concat());
        payloads.follow(&Piece { head, payload: own }, shared);
    }
    (given, wanted)
}

proptest! {
    /// Each payload takes its blank's place, for any cuts into frames and writes.
    #[test]
    fn payloads_take_the_place_of_blanks(
        lens in prop::collection::vec((0usize..40, prop_oneof![Just(0), 1usize..60, 1usize..3000]), 1..12),
        frames in prop::collection::vec((0u8..4, 0usize..2000), 1..12),
        cuts in cuts(),
    ) {
        let mark = Mark::of_answer();
        let request = frame(Header::DATA, 0, 3, &marked(mark));
        let mut run = Run::new(Side::Server, [&PREFACE[..], &request].concat(), Vec::new(), &cuts);
        while !run.direct.socket.is_read() || run.direct.outlets.is_empty() {
            run.turn().unwrap();
        }
        let taps = run.direct.taps.clone();
        let mut payloads = Payloads::claim(&taps, mark).unwrap();
        prop_assert!(Payloads::claim(&taps, mark).is_none(), "once");
        let (given, wanted) = answer(&lens, &mut payloads);
        let (mut at, mut expected) = (0, Vec::new());
        for &(kind, len) in frames.iter().cycle() {
            let other = frame(if kind == 0 { 4 } else { Header::DATA }, 0, 5, &bytes(len, 3));
            if kind < 2 {
                run.writing.extend_from_slice(&other);
                expected.extend_from_slice(&other);
            }
            let end = given.len().min(at + len + 1);
            run.writing.extend_from_slice(&frame(Header::DATA, 0, 3, &given[at..end]));
            expected.extend_from_slice(&frame(Header::DATA, 0, 3, &wanted[at..end]));
            at = end;
            if at == given.len() {
                break;
            }
        }
        let trailers = frame(Header::HEADERS, Header::END_STREAM, 3, b"status");
        run.writing.extend_from_slice(&trailers);
        expected.extend_from_slice(&trailers);
        let before = run.direct.socket.outgoing.len();
        while !run.writing.is_empty() {
            run.turn().unwrap();
        }
        prop_assert!(run.direct.socket.outgoing[before..] == expected);
        prop_assert!(run.direct.outlets.is_empty(), "it is over");
    }

    #[test]
    fn requests_part_at_their_marks(
        frames in sent(),
        lens in prop::collection::vec(0usize..700, 0..20),
        cuts in cuts(),
        modes in (modes(), modes()),
        late in 0usize..30,
    ) {
        let marks = [Mark::of_request(), Mark::of_request()];
        let expected = expected(&frames, Some(marks));
        let own = written(&lens).concat();
        let mut run = Run::new(Side::Server, expected.sent.clone(), own.clone(), &cuts);
        let sinks = [Collect::new(&modes.0), Collect::new(&modes.1)];
        let mut claims: [Option<Claim>; 2] = [None, None];
        let mut over = false;
        for turn in 0..200_000 {
            over |= run.turn().unwrap();
            for which in 0..2 {
                if claims[which].is_none() && turn >= late {
                    claims[which] = run.direct.taps.claim(marks[which]);
                    claims[which].iter().for_each(|claim| claim.install(Box::new(sinks[which].clone())));
                }
                sinks[which].unstall();
                claims[which].iter().for_each(Claim::resume);
            }
            if over && turn > late && run.writing.is_empty() && claims.iter().flatten().all(Claim::is_drained) {
                break;
            }
        }
        // Further turns return the last of the owed windows.
        for _ in 0..100 {
            run.turn().unwrap();
        }
        run.check(&expected, &sinks, 0, &own);
    }

    #[test]
    fn answers_part_once_their_request_is_out(
        frames in sent(),
        cuts in cuts(),
        modes in (modes(), modes()),
    ) {
        let expected = expected(&frames, None);
        let marks = [Mark::of_answer(), Mark::of_answer()];
        let mut own = PREFACE.to_vec();
        for (which, mark) in marks.into_iter().enumerate() {
            let id = 2 * which as u32 + 1;
            own.extend(frame(1, 0, id, &bytes(30, which)));
            own.extend(frame(Header::DATA, Header::END_STREAM, id, &marked(mark)));
        }
        let mut run = Run::new(Side::Client, Vec::new(), own.clone(), &cuts);
        let sinks = [Collect::new(&modes.0), Collect::new(&modes.1)];
        let claims = [0, 1].map(|which| run.direct.taps.expect(marks[which], Box::new(sinks[which].clone())));
        let mut context = Context::from_waker(Waker::noop());
        while !run.writing.is_empty() {
            let cut = next(&mut run.slices).min(run.writing.len());
            let write = Pin::new(&mut run.direct).poll_write(&mut context, &run.writing[..cut]);
            if let Poll::Ready(count) = write {
                run.writing.drain(..count.unwrap());
            }
        }
        // Answers can come only after the requests have gone out.
        run.direct.socket.incoming = expected.sent.clone();
        for _ in 0..200_000 {
            let over = run.turn().unwrap();
            for (sink, claim) in sinks.iter().zip(&claims) {
                sink.unstall();
                claim.resume();
            }
            if over && claims.iter().all(Claim::is_drained) {
                break;
            }
        }
        for _ in 0..100 {
            run.turn().unwrap();
        }
        run.check(&expected, &sinks, PREFACE.len(), &own[PREFACE.len()..]);
    }
}

proptest! {
    #[test]
    fn noise_ends_in_h2s_hands_or_in_an_error(
        noise in prop::collection::vec((any::<u8>(), 0usize..300, 0u8..4, 0u32..4, any::<u8>()), 0..30),
        cuts in cuts(),
        modes in modes(),
        kept in any::<prop::sample::Index>(),
    ) {
        // The frames have any flags, padding and order, and are cut off anywhere.
        let frames = noise.iter().map(|&(flags, len, kind, stream, first)| {
            frame(kind, flags, stream, &[&[first][..], &bytes(len, 3)].concat())
        });
        let mut rest: Vec<u8> = frames.flatten().collect();
        rest.truncate(kept.index(rest.len() + 1));
        let (mut run, mark) = begun(&rest);
        run.direct.socket = Script::new(run.direct.socket.incoming.clone(), &cuts);
        let (sink, mut claim, mut over) = (Collect::new(&modes), None, false);
        for _ in 0..20_000 {
            over = run.turn().unwrap_or(true);
            claim = claim.or_else(|| {
                let claim = run.direct.taps.claim(mark)?;
                claim.install(Box::new(sink.clone()));
                Some(claim)
            });
            sink.unstall();
            claim.iter().for_each(Claim::resume);
            if over {
                break;
            }
        }
        prop_assert!(over, "it never came to the end");
        let diverted = sink.lock().got.len();
        prop_assert!(run.passed.len() + diverted <= run.direct.socket.incoming.len() + HEADER_BYTES * noise.len());
    }
}

/// A server's connection on which stream 1 has begun with a mark, and which sends `rest`.
fn begun(rest: &[u8]) -> (Run, Mark) {
    let mark = Mark::of_request();
    let first = frame(Header::DATA, 0, 1, &marked(mark));
    let run = Run::new(Side::Server, [&PREFACE[..], &first, rest].concat(), Vec::new(), &[3000, 0]);
    (run, mark)
}

#[test]
fn what_nobody_wants_any_more_goes_to_h2_from_the_next_frame_on() {
    let later = frame(Header::DATA, 0, 1, &bytes(300, 2));
    let (mut run, mark) = begun(&[&frame(Header::DATA, 0, 1, &bytes(9000, 1))[..], &later].concat());
    run.room = [512].into();
    let claim = loop {
        run.turn().unwrap();
        if let Some(claim) = run.direct.taps.claim(mark) {
            break claim;
        }
    };
    while run.direct.streams[0].tap.state().kept_bytes() == 0 {
        run.turn().unwrap();
    }
    drop(claim);
    while !run.turn().unwrap() {}
    assert!(run.passed.ends_with(&later));
    assert!(run.passed.len() < 600, "h2 got {} bytes", run.passed.len());
    assert!(run.direct.streams.is_empty());
    let (_, given_back) = run.outgoing(0);
    assert_eq!(given_back(0) + run.direct.credit.owed, 9000);
}

#[test]
fn what_is_no_http2_passes() {
    let request = b"GET / HTTP/1.1\r\nHost: longshore\r\n\r\n".to_vec();
    let mut run = Run::new(Side::Server, request.clone(), Vec::new(), &[7]);
    while !run.turn().unwrap() {}
    assert_eq!(run.passed, request);
}
