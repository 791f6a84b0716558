//! How connections end, and what waits where the other end does not read.

use std::{future::poll_fn, io::IoSlice};

use rustls::unbuffered::ConnectionState;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

use super::*;

#[tokio::test]
async fn an_end_that_nobody_vouches_for_is_an_error() {
    let configs = Configs::new();
    for bytes in [0, 5, 20_000] {
        // All of it arrives, or all but a part of the last record.
        for lost in [0, 7] {
            let (mut client, server) = configs.pair(&[usize::MAX]).await;
            client.write_all(&noise(bytes)).await.unwrap();
            let mut server = server;
            let sealed = drain(&mut server).await;
            let (mut pipe, far) = duplex(256 * 1024);
            server.socket().pipe = far;
            pipe.write_all(&sealed[..sealed.len().saturating_sub(lost)]).await.unwrap();
            drop(pipe);
            let mut read = Vec::new();
            let error = server.read_to_end(&mut read).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
            assert!(noise(bytes).starts_with(&read) && (lost > 0 || read.len() == bytes));
        }
    }
}

#[tokio::test]
async fn a_closed_stream_takes_nothing_more_and_reads_on() {
    let configs = Configs::new();
    let (mut client, mut server) = configs.pair(&[usize::MAX]).await;
    client.shutdown().await.unwrap();
    assert_eq!(client.write(b"late").await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    assert_eq!(server.read(&mut [0; 9]).await.unwrap(), 0);
    assert_eq!(server.read(&mut [0; 9]).await.unwrap(), 0);
    server.write_all(b"answer").await.unwrap();
    server.shutdown().await.unwrap();
    let mut read = Vec::new();
    client.read_to_end(&mut read).await.unwrap();
    assert_eq!(read, b"answer");
}

#[tokio::test]
async fn no_more_is_sealed_than_the_socket_takes() {
    let configs = Configs::new();
    let (mut client, mut server) = configs.pair(&[usize::MAX]).await;
    let sent = noise(4 << 20);
    // Nobody reads: the pipe fills up, then what is sealed.
    let mut taken = 0;
    poll_fn(|context| {
        let slice = [IoSlice::new(&sent[taken..])];
        match Pin::new(&mut client).poll_write_vectored(context, &slice) {
            Poll::Ready(count) => {
                taken += count.unwrap();
                assert!(taken < sent.len(), "all of it was sealed");
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Poll::Pending => Poll::Ready(()),
        }
    })
    .await;
    assert!((256 * 1024..=(256 + 128) * 1024).contains(&taken), "{taken}");
    let mut read = vec![0; sent.len()];
    let rest = async {
        client.write_all(&sent[taken..]).await.unwrap();
        client.flush().await.unwrap();
    };
    let both = async { tokio::join!(rest, server.read_exact(&mut read)).1.unwrap() };
    timeout(PATIENCE, both).await.unwrap();
    assert!(read == sent);
}

/// A hello that says that data comes with it. What comes is skipped by rustls, which is given it again and again.
fn hello_with_early_data(configs: &Configs) -> Vec<u8> {
    const EARLY_DATA: [u8; 4] = [0, 42, 0, 0];
    let mut end = configs.client_end();
    let mut hello = Vec::new();
    if let Ok(ConnectionState::EncodeTlsData(mut data)) = end.process_tls_records(&mut []).state {
        hello.resize(16 * 1024, 0);
        let bytes = data.encode(&mut hello).unwrap();
        hello.truncate(bytes);
    }
    // Header, type and length, version, random; then the session, the ciphers and the compressions, each with its length.
    let session = 5 + 4 + 2 + 32;
    let ciphers = session + 1 + usize::from(hello[session]);
    let compressions = ciphers + 2 + usize::from(u16::from_be_bytes([hello[ciphers], hello[ciphers + 1]]));
    let extensions = compressions + 1 + usize::from(hello[compressions]);
    hello.extend_from_slice(&EARLY_DATA);
    for length in [3, 7, extensions] {
        let longer = u16::from_be_bytes([hello[length], hello[length + 1]]) + EARLY_DATA.len() as u16;
        hello[length..length + 2].copy_from_slice(&longer.to_be_bytes());
    }
    hello
}

/// Each is refused as soon as it is seen, though the connection stays open.
#[tokio::test]
async fn handshakes_that_are_none_end_at_once() {
    let configs = Configs::new();
    let hello = [&[22, 3, 1, 0x40, 0][..], &[1, 0, 0xFF, 0]].concat();
    let long =
        [&hello[..], &vec![7; 0x4000 - 4], &[&[22, 3, 3, 0x40, 0][..], &[7; 0x4000]].concat().repeat(9)];
    for (said, why) in [
        (b"GET / HTTP/1.1\r\n".to_vec(), "InvalidContentType"),
        (vec![22, 3, 1, 0xFF, 0xFF], "MessageTooLarge"),
        (vec![23, 3, 3, 0, 1, 0], "Inappropriate"),
        (vec![21, 3, 3, 0, 2, 2, 40], "AlertReceived"),
        (long.concat(), "HandshakePayloadTooLarge"),
        (
            [hello_with_early_data(&configs), [23, 3, 3, 0, 0].repeat(300)].concat(),
            "HandshakePayloadTooLarge",
        ),
    ] {
        let (near, mut far) = duplex(256 * 1024);
        far.write_all(&said).await.unwrap();
        let shaking = shake(configs.server_end(), Cut::new(near, &[usize::MAX]));
        let error = timeout(PATIENCE, shaking).await.unwrap().map(|_| ()).unwrap_err();
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        assert!(format!("{inner:?}").contains(why), "{why}: {inner:?}");
    }
    let (near, far) = duplex(1024);
    drop(far);
    let error = shake(configs.server_end(), Cut::new(near, &[usize::MAX])).await.map(|_| ()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}

/// A client refuses a server of an authority that it does not know, and the server hears why.
#[tokio::test]
async fn a_refusal_is_heard() {
    let (configs, others) = (Configs::new(), Configs::new());
    let (near, far) = duplex(256 * 1024);
    let (client, server) = tokio::join!(
        shake(others.client_end(), Cut::new(near, &[usize::MAX])),
        shake(configs.server_end(), Cut::new(far, &[usize::MAX]))
    );
    let error = client.map(|_| ()).unwrap_err();
    assert!(format!("{error:?}").contains("UnknownIssuer"), "{error:?}");
    let error = server.map(|_| ()).unwrap_err();
    assert!(format!("{error:?}").contains("AlertReceived(UnknownCA)"), "{error:?}");
}
