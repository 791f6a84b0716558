//! Shaking hands over a socket, by rustls, until the keys are there.

use std::{
    future::poll_fn,
    io::{self, IoSliceMut},
    pin::Pin,
    task::Poll,
};

use longshore_proto::limits::MOST_CHAIN_BYTES;
use rustls::{
    Error, ExtractedSecrets, InvalidMessage, PeerMisbehaved,
    client::{ClientConnectionData, UnbufferedClientConnection},
    pki_types::CertificateDer,
    server::{ServerConnectionData, UnbufferedServerConnection},
    unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedConnectionCommon, UnbufferedStatus},
};

use super::{
    files::length,
    incoming::Incoming,
    keys::{Keys, Schedule},
    stream::Stream,
};
use crate::direct::Socket;

/// One end of a handshake.
pub(super) trait End: Send {
    type Data: Send;

    fn common(&mut self) -> &mut UnbufferedConnectionCommon<Self::Data>;

    fn process<'c, 'i>(&'c mut self, incoming: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data>;

    fn into_secrets(self) -> Result<(ExtractedSecrets, Schedule), Error>;
}

impl End for UnbufferedClientConnection {
    type Data = ClientConnectionData;

    fn common(&mut self) -> &mut UnbufferedConnectionCommon<ClientConnectionData> {
        self
    }

    fn process<'c, 'i>(&'c mut self, incoming: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }

    fn into_secrets(self) -> Result<(ExtractedSecrets, Schedule), Error> {
        let (secrets, schedule) = self.dangerous_into_kernel_connection()?;
        Ok((secrets, Schedule::Client(Box::new(schedule))))
    }
}

impl End for UnbufferedServerConnection {
    type Data = ServerConnectionData;

    fn common(&mut self) -> &mut UnbufferedConnectionCommon<ServerConnectionData> {
        self
    }

    fn process<'c, 'i>(&'c mut self, incoming: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }

    fn into_secrets(self) -> Result<(ExtractedSecrets, Schedule), Error> {
        let (secrets, schedule) = self.dangerous_into_kernel_connection()?;
        Ok((secrets, Schedule::Server(Box::new(schedule))))
    }
}

/// What a handshake has come to.
pub(super) struct Shaken<S> {
    pub(super) stream: Stream<S>,
    /// The protocol that both ends have agreed on.
    pub(super) protocol: Option<Vec<u8>>,
    /// What the other end has shown, its own certificate first.
    pub(super) chain: Vec<CertificateDer<'static>>,
}

/// How many records rustls may leave where they are. It looks at all of them again whenever one more has come: 13,000 empty ones, which
/// fit into the buffer, would keep a thread busy for a second. The longest hello takes 256 if each has 256 bytes of it.
const MOST_RECORDS: usize = 256;

/// What is to be done next.
enum Next {
    /// To see what rustls wants now.
    Again,
    Send,
    /// To give rustls more, unless hands are shaken already.
    More,
}

/// Shakes hands. It has no deadline of its own.
///
/// # Errors
/// Where the socket fails or ends, or rustls refuses the other end or what it sends: then with rustls' own error within.
pub(super) async fn shake<S: Socket>(mut end: impl End, mut socket: S) -> io::Result<Shaken<S>> {
    let mut incoming = Incoming::new();
    let mut outgoing = Vec::new();
    // rustls is given one record at a time, so that what comes behind the handshake is left sealed. Whole records end at `whole`;
    // a part of the first one is given too, since it may be wrong already.
    let (mut whole, mut given) = (0_usize, 0_usize);
    // How many whole ones it was given since it last took any.
    let mut records = 0;
    loop {
        let UnbufferedStatus { discard, state, .. } = end.process(&mut incoming.bytes()[..given]);
        let next = state.and_then(|state| next(state, &mut outgoing));
        incoming.discard(discard);
        (whole, given) = (whole.saturating_sub(discard), given.saturating_sub(discard));
        records = if discard > 0 { 0 } else { records };
        match next {
            Ok(Next::Again) => {}
            Ok(Next::Send) => send(&mut socket, &mut outgoing).await?,
            Ok(Next::More) if !end.common().is_handshaking() => break,
            Ok(Next::More) => {
                given = loop {
                    if let Some(end) = incoming.end_of_record(whole) {
                        (whole, records) = (end, records + 1);
                        break whole;
                    }
                    if whole == 0 && given < incoming.bytes().len() {
                        break incoming.bytes().len();
                    }
                    read(&mut socket, &mut incoming).await?;
                };
                if records > MOST_RECORDS {
                    return Err(refused(InvalidMessage::HandshakePayloadTooLarge.into()));
                }
            }
            Err(error) => {
                tell(&mut end, &mut incoming.bytes()[..given], &mut socket, outgoing).await;
                return Err(refused(error));
            }
        }
    }
    if whole > 0 {
        return Err(refused(PeerMisbehaved::KeyEpochWithPendingFragment.into()));
    }
    let protocol = end.common().alpn_protocol().map(<[u8]>::to_vec);
    let chain = end.common().peer_certificates().map(<[_]>::to_vec).unwrap_or_default();
    if length(&chain) > MOST_CHAIN_BYTES {
        return Err(refused(InvalidMessage::CertificatePayloadTooLarge.into()));
    }
    let keys = end.into_secrets().and_then(|(secrets, schedule)| Keys::new(secrets, schedule));
    let stream = Stream::new(socket, keys.map_err(refused)?, incoming);
    Ok(Shaken { stream, protocol, chain })
}

pub(super) fn refused(error: Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

fn next<D>(state: ConnectionState<'_, '_, D>, outgoing: &mut Vec<u8>) -> Result<Next, Error> {
    match state {
        ConnectionState::EncodeTlsData(data) => encode(data, outgoing).map(|()| Next::Again),
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            Ok(Next::Send)
        }
        // A server may send data before the client has finished.
        ConnectionState::BlockedHandshake | ConnectionState::WriteTraffic(_) => Ok(Next::More),
        _ => Err(InvalidMessage::UnexpectedMessage("data or an end before the handshake was over").into()),
    }
}

/// Adds a record of the handshake to what is sent.
fn encode<D>(mut data: EncodeTlsData<'_, D>, outgoing: &mut Vec<u8>) -> Result<(), Error> {
    let at = outgoing.len();
    if let Err(EncodeError::InsufficientSize(least)) = data.encode(&mut []) {
        outgoing.resize(at + least.required_size, 0);
        data.encode(&mut outgoing[at..]).map_err(|error| Error::General(error.to_string()))?;
    }
    Ok(())
}

async fn send(socket: &mut impl Socket, outgoing: &mut Vec<u8>) -> io::Result<()> {
    let mut rest = &outgoing[..];
    while !rest.is_empty() {
        match poll_fn(|context| Pin::new(&mut *socket).poll_write(context, rest)).await? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            count => rest = &rest[count..],
        }
    }
    outgoing.clear();
    poll_fn(|context| Pin::new(&mut *socket).poll_flush(context)).await
}

async fn read(socket: &mut impl Socket, incoming: &mut Incoming) -> io::Result<()> {
    let room = incoming.room();
    if room.is_empty() {
        return Err(refused(InvalidMessage::HandshakePayloadTooLarge.into()));
    }
    match poll_fn(|context| socket.poll_read_into(context, &mut [IoSliceMut::new(room)])).await? {
        0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection ended within the handshake")),
        count => {
            incoming.filled(count);
            Ok(())
        }
    }
}

/// Tells the other end why it is refused, as far as its socket takes it now. Nobody waits for that.
async fn tell<E: End>(end: &mut E, mut given: &mut [u8], socket: &mut impl Socket, mut outgoing: Vec<u8>) {
    // Asked again, rustls would look at the wrong record once more.
    while end.common().wants_write() {
        let UnbufferedStatus { discard, state, .. } = end.process(given);
        let Ok(ConnectionState::EncodeTlsData(data)) = state else { break };
        if encode(data, &mut outgoing).is_err() {
            break;
        }
        given = &mut given[discard..];
    }
    if !outgoing.is_empty() {
        poll_fn(|context| Poll::Ready(Pin::new(&mut *socket).poll_write(context, &outgoing).is_ready()))
            .await;
    }
}
