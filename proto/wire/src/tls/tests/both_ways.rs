//! Data crosses both ways, however it is cut, and keys are replaced on the way.

use std::io::IoSlice;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, split},
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::*;

/// Which end is this crate's. The other one is tokio-rustls'.
#[derive(Clone, Copy, Debug)]
enum Ours {
    Client,
    Server,
}

/// Shakes hands between this crate's end, with a cut socket, and tokio-rustls'.
async fn shaken(configs: &Configs, ours: Ours, cuts: &[usize]) -> (Stream<Cut>, TlsStream<DuplexStream>) {
    let (near, far) = duplex(100_000);
    let near = Cut::new(near, cuts);
    let (client, server) = (Arc::new(configs.client.clone()), Arc::new(configs.server.clone()));
    match ours {
        Ours::Client => {
            let (ours, theirs) =
                tokio::join!(shake(configs.client_end(), near), TlsAcceptor::from(server).accept(far));
            (checked(ours), theirs.unwrap().into())
        }
        Ours::Server => {
            let (ours, theirs) = tokio::join!(
                shake(configs.server_end(), near),
                TlsConnector::from(client).connect(name(), far)
            );
            (checked(ours), theirs.unwrap().into())
        }
    }
}

/// Writes in slices of many lengths.
async fn write_slices(to: &mut (impl AsyncWrite + Unpin), mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let mut slices = Vec::new();
        let mut rest = bytes;
        for len in [9, 0, 130, 40_000, 1, 16_384, 90_000] {
            let (now, later) = rest.split_at(rest.len().min(len));
            slices.push(IoSlice::new(now));
            rest = later;
        }
        let count = std::future::poll_fn(|context| Pin::new(&mut *to).poll_write_vectored(context, &slices));
        bytes = &bytes[count.await.unwrap()..];
    }
    to.flush().await.unwrap();
}

/// Sends both ways at once, then closes both ways.
async fn exchange<T: AsyncRead + AsyncWrite + Unpin>(ours: Stream<Cut>, theirs: T, bytes: usize) {
    let sent = noise(bytes);
    let (mut our_reader, mut our_writer) = split(ours);
    let (mut their_reader, mut their_writer) = split(theirs);
    let (mut to_them, mut to_us) = (Vec::new(), Vec::new());
    tokio::join!(
        async {
            write_slices(&mut our_writer, &sent).await;
            our_writer.shutdown().await.unwrap();
        },
        async {
            write_slices(&mut their_writer, &sent).await;
            their_writer.shutdown().await.unwrap();
        },
        // That they end without an error means that each end has closed.
        async { their_reader.read_to_end(&mut to_them).await.map(drop).unwrap() },
        async { our_reader.read_to_end(&mut to_us).await.map(drop).unwrap() },
    );
    assert!(to_them == sent && to_us == sent, "{} and {} of {bytes} bytes", to_them.len(), to_us.len());
}

#[tokio::test]
async fn rustls_reads_what_is_written_and_writes_what_is_read() {
    let configs = Configs::new();
    for ours in [Ours::Client, Ours::Server] {
        for (cuts, bytes) in [
            (&[1][..], 40_000),
            (&[3, 0, 70_000], 500_000),
            (&[16_000, 5, 1, 0, 0], 200_000),
            (&[usize::MAX], 3_000_000),
            (&[usize::MAX], 0),
        ] {
            let crossing = async {
                let (stream, theirs) = shaken(&configs, ours, cuts).await;
                exchange(stream, theirs, bytes).await;
            };
            timeout(PATIENCE, crossing).await.unwrap_or_else(|_| panic!("{ours:?}, {cuts:?} hangs"));
        }
    }
}

/// A client sends as soon as it has shaken hands: its data comes with the handshake's last record.
#[tokio::test]
async fn what_comes_with_the_handshake_is_not_lost() {
    let configs = Configs::new();
    let (near, far) = duplex(100_000);
    let connector = TlsConnector::from(Arc::new(configs.client.clone()));
    let sent = noise(50_000);
    // Nothing is read until all of it is there.
    let late = Cut::new(near, &[0, 0, 0, usize::MAX]);
    let (ours, _theirs) = tokio::join!(shake(configs.server_end(), late), async {
        let mut theirs = connector.connect(name(), far).await.unwrap();
        // The first record is short, so that one read brings all of it.
        for part in [&sent[..100], &sent[100..]] {
            theirs.write_all(part).await.unwrap();
        }
        theirs.shutdown().await.unwrap();
        theirs
    });
    let mut read = Vec::new();
    checked(ours).read_to_end(&mut read).await.unwrap();
    assert!(read == sent);
}

#[tokio::test]
async fn a_key_that_has_sealed_enough_is_replaced() {
    let configs = Configs::new();
    for ours in [Ours::Client, Ours::Server] {
        let (mut stream, mut theirs) = shaken(&configs, ours, &[usize::MAX]).await;
        stream.keys().most = 3;
        // rustls' end replaces its own key now and then.
        for turn in 0..20 {
            refresh(&mut theirs);
            theirs.write_all(&[turn; 40_000]).await.unwrap();
            let mut read = vec![0; 40_000];
            stream.read_exact(&mut read).await.unwrap();
            assert_eq!(read, [turn; 40_000]);
            stream.write_all(&[turn; 60_000]).await.unwrap();
            let mut read = vec![0; 60_000];
            theirs.read_exact(&mut read).await.unwrap();
            assert_eq!(read, [turn; 60_000]);
        }
        exchange(stream, theirs, 300_000).await;
    }
}

#[tokio::test]
async fn data_goes_to_several_places_at_once() {
    let configs = Configs::new();
    let (mut client, mut server) = configs.pair(&[usize::MAX]).await;
    let sent = noise(30_000);
    client.write_all(&sent).await.unwrap();
    let (mut near, mut far) = (vec![0; 20_000], vec![0; 20_000]);
    assert_eq!(read_into(&mut server, &mut near, &mut far).await.unwrap(), 30_000);
    assert!(near == sent[..20_000] && far[..10_000] == sent[20_000..]);
}

fn refresh(stream: &mut TlsStream<DuplexStream>) {
    match stream {
        TlsStream::Client(stream) => stream.get_mut().1.refresh_traffic_keys().unwrap(),
        TlsStream::Server(stream) => stream.get_mut().1.refresh_traffic_keys().unwrap(),
    }
}
