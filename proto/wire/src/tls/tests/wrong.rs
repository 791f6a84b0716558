//! What must not come: each ends the connection, for this reason, of which the other end is told.

use longshore_proto::limits::MOST_CHAIN_BYTES;
use rustls::{
    AlertDescription, ContentType, Error, InvalidMessage, PeerMisbehaved, crypto::cipher::OutboundChunks,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

use super::*;

/// What an end sends to the other.
enum Sent<'a> {
    Sealed(ContentType, &'a [u8]),
    /// Bytes that are not sealed.
    Plain(&'a [u8]),
    /// A record of data, with one of its bits turned.
    Turned,
    /// A message that says so, and then records with the new key.
    NewKey(u8),
}
use Sent::{NewKey, Plain, Sealed, Turned};

const DATA: ContentType = ContentType::ApplicationData;
const MESSAGE: ContentType = ContentType::Handshake;
const ALERT: ContentType = ContentType::Alert;

async fn send(from: &mut Stream<Cut>, sent: &[Sent<'_>]) {
    for part in sent {
        let mut records = Vec::new();
        let mut seal = |kind, bytes: &[u8]| {
            from.keys().seal(kind, &OutboundChunks::Single(bytes), &mut records).unwrap();
        };
        match part {
            Sealed(kind, bytes) => seal(*kind, bytes),
            Plain(bytes) => records.extend_from_slice(bytes),
            Turned => {
                seal(DATA, b"data");
                records[7] ^= 1;
            }
            NewKey(request) => {
                seal(MESSAGE, &[24, 0, 0, 1, *request]);
                from.keys().take_next_sealing().unwrap();
            }
        }
        from.socket().pipe.write_all(&records).await.unwrap();
    }
}

/// Sends this, and data behind it, to a server's end or a client's. Returns what was read, or the error, and what the sender is told.
async fn outcome(to_server: bool, sent: &[Sent<'_>]) -> (Result<Vec<u8>, Error>, Option<AlertDescription>) {
    let (client, server) = Configs::new().pair(&[usize::MAX]).await;
    let (mut from, mut to) = if to_server { (client, server) } else { (server, client) };
    send(&mut from, sent).await;
    send(&mut from, &[Sealed(DATA, b"end")]).await;
    let mut read = Vec::new();
    let failed = loop {
        let mut some = [0; 100];
        match timeout(PATIENCE, to.read(&mut some)).await.unwrap() {
            Ok(0) => break None,
            Ok(count) => read.extend(&some[..count]),
            Err(error) => break Some(error),
        }
        if read.ends_with(b"end") {
            break None;
        }
    };
    let Some(error) = failed else { return (Ok(read), None) };
    let error = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()).unwrap().clone();
    // It is the same each time, and nothing more is written.
    let again = to.read(&mut [0; 100]).await.unwrap_err();
    assert_eq!(again.get_ref().and_then(|inner| inner.downcast_ref::<Error>()), Some(&error));
    to.write_all(b"late").await.unwrap_err();
    drop(to);
    let told = from.read(&mut [0; 100]).await.unwrap_err();
    let told = match told.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(Error::AlertReceived(alert)) => Some(*alert),
        _ => None,
    };
    (Err(error), told)
}

#[tokio::test]
async fn wrong_records_end_the_connection() {
    let long = [&[23, 3, 3, 0x41, 0x01][..], &[0; 0x4101]].concat();
    let overfull = vec![7; (1 << 14) + 1];
    let unexpected =
        || Error::from(InvalidMessage::UnexpectedMessage("a message of a handshake that is over"));
    for (sent, why, told) in [
        (vec![Plain(b"GET / HTTP/1.1\r\n")], InvalidMessage::InvalidContentType.into(), "UnexpectedMessage"),
        (vec![Plain(&[23, 9, 3, 0, 1, 0])], InvalidMessage::UnknownProtocolVersion.into(), "DecodeError"),
        (vec![Plain(&long)], Error::PeerSentOversizedRecord, "RecordOverflow"),
        (vec![Sealed(DATA, &overfull)], Error::PeerSentOversizedRecord, "RecordOverflow"),
        (vec![Plain(&[21, 3, 3, 0, 2, 1, 0])], Error::DecryptError, "BadRecordMac"),
        (vec![Plain(&[23, 3, 3, 0, 5, 1, 2, 3, 4, 5])], Error::DecryptError, "BadRecordMac"),
        (
            vec![Plain(&[20, 3, 3, 0, 1, 1])],
            PeerMisbehaved::IllegalMiddleboxChangeCipherSpec.into(),
            "UnexpectedMessage",
        ),
        (vec![Turned], Error::DecryptError, "BadRecordMac"),
        (vec![Sealed(MESSAGE, b"")], InvalidMessage::InvalidEmptyPayload.into(), "DecodeError"),
        (vec![Sealed(MESSAGE, &[1, 0, 0, 1, 0])], unexpected(), "UnexpectedMessage"),
        // A server gets no tickets.
        (vec![Sealed(MESSAGE, &[4, 0, 0, 1, 0])], unexpected(), "UnexpectedMessage"),
        (
            vec![Sealed(MESSAGE, &[24, 0, 0, 2, 0, 0])],
            InvalidMessage::InvalidKeyUpdate.into(),
            "IllegalParameter",
        ),
        (
            vec![Sealed(MESSAGE, &[24, 0, 0, 1, 2])],
            InvalidMessage::InvalidKeyUpdate.into(),
            "IllegalParameter",
        ),
        (
            vec![Sealed(MESSAGE, &[24, 0, 0, 1, 0, 24])],
            PeerMisbehaved::KeyEpochWithPendingFragment.into(),
            "UnexpectedMessage",
        ),
        (
            vec![Sealed(MESSAGE, &[24, 0]), Sealed(DATA, b"data")],
            PeerMisbehaved::MessageInterleavedWithHandshakeMessage.into(),
            "UnexpectedMessage",
        ),
        (
            vec![Sealed(ALERT, &[2, 0, 0])],
            InvalidMessage::TrailingData("AlertMessagePayload").into(),
            "DecodeError",
        ),
    ] {
        let outcome = outcome(true, &sent).await;
        assert_eq!(outcome.0, Err(why));
        assert_eq!(outcome.1.map(|told| format!("{told:?}")).as_deref(), Some(told));
    }
}

#[tokio::test]
async fn what_costs_and_moves_nothing_is_bounded() {
    let many = |of: fn() -> Sent<'static>, count| (0..count).map(|_| of()).collect::<Vec<_>>();
    for (of, most, why) in [
        ((|| Sealed(DATA, b"")) as fn() -> Sent<'static>, 32, PeerMisbehaved::TooManyEmptyFragments),
        (|| NewKey(0), 32, PeerMisbehaved::TooManyKeyUpdateRequests),
        (|| Sealed(ALERT, &[1, 90]), 4, PeerMisbehaved::TooManyWarningAlertsReceived),
    ] {
        assert_eq!(outcome(true, &many(of, most)).await, (Ok(b"end".to_vec()), None));
        let (failed, told) = outcome(true, &many(of, most + 1)).await;
        assert_eq!((failed, told), (Err(why.into()), Some(AlertDescription::UnexpectedMessage)));
    }
}

#[tokio::test]
async fn alerts_end_the_connection_and_closing_ends_the_data() {
    for alert in [[2, 42], [1, 42], [2, 90]] {
        let description = AlertDescription::from(alert[1]);
        let expected = (Err(Error::AlertReceived(description)), None);
        assert_eq!(outcome(true, &[Sealed(ALERT, &alert)]).await, expected);
    }
    // What comes behind the end is not read.
    let read = outcome(true, &[Sealed(DATA, b"all"), Sealed(ALERT, &[1, 0]), Turned]).await;
    assert_eq!(read, (Ok(b"all".to_vec()), None));
}

#[tokio::test]
async fn a_client_skips_tickets_however_they_are_cut() {
    let ticket = [&[4, 0, 0x50, 0][..], &[7; 0x5000]].concat();
    let two = [&ticket[..], &ticket].concat();
    for cuts in [vec![1, 2, 3, 5, 20_000], vec![16_000, 16_000], vec![20_485, 20_487]] {
        let (mut parts, mut rest) = (Vec::new(), &two[..]);
        for cut in cuts {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            parts.extend(now.chunks(1 << 14));
            rest = later;
        }
        parts.extend(rest.chunks(1 << 14));
        let sent: Vec<_> = parts.into_iter().map(|part| Sealed(MESSAGE, part)).collect();
        assert_eq!(outcome(false, &sent).await, (Ok(b"end".to_vec()), None));
    }
}

/// A record with one byte of data, and one with a message of five bytes: header, type and tag make 22 bytes more.
const BYTE: usize = 23;
const KEY: usize = 27;

#[tokio::test]
async fn a_key_seals_no_more_records_than_it_may() {
    let (mut client, mut server) = Configs::new().pair(&[usize::MAX]).await;
    // The handshake's keys are others: these have sealed nothing yet.
    client.keys().most = 2;
    for sealed in [BYTE, BYTE, KEY + BYTE, BYTE, KEY + BYTE] {
        client.write_all(b"!").await.unwrap();
        assert_eq!(drain(&mut server).await.len(), sealed);
    }
}

#[tokio::test]
async fn who_asks_for_a_new_key_gets_one() {
    let mut configs = Configs::new();
    // Tickets would come before the answers.
    configs.server.send_tls13_tickets = 0;
    let (mut client, mut server) = configs.pair(&[usize::MAX]).await;
    for (asked, answer) in [(0, BYTE), (1, KEY + BYTE), (2, KEY + BYTE), (0, BYTE)] {
        for _ in 0..asked {
            send(&mut client, &[NewKey(1)]).await;
        }
        send(&mut client, &[NewKey(0), Sealed(DATA, b"?")]).await;
        let mut byte = [0];
        server.read_exact(&mut byte).await.unwrap();
        server.write_all(b"!").await.unwrap();
        let sealed = drain(&mut client).await;
        assert_eq!(sealed.len(), answer, "{asked} asked");
        // The client opens what was looked at.
        server.socket().pipe.write_all(&sealed).await.unwrap();
        client.read_exact(&mut byte).await.unwrap();
        assert_eq!(&byte, b"!");
    }
}

#[tokio::test]
async fn long_chains_are_refused() {
    for (bytes, is_refused) in [(1000, false), (MOST_CHAIN_BYTES, true)] {
        let configs = Configs::with_more(bytes);
        let (near, far) = duplex(256 * 1024);
        let client = shake(configs.client_end(), Cut::new(near, &[usize::MAX]));
        let server = shake(configs.server_end(), Cut::new(far, &[usize::MAX]));
        let (_client, server) = timeout(PATIENCE, async { tokio::join!(client, server) }).await.unwrap();
        let refused =
            server.err().map(|error| error.get_ref().unwrap().downcast_ref::<Error>().unwrap().clone());
        let wanted = is_refused.then(|| InvalidMessage::CertificatePayloadTooLarge.into());
        assert_eq!(refused, wanted, "{bytes} bytes");
    }
}
