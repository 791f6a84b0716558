//! What a TLS port answers to HTTP/2 that is not encrypted: HTTP/2's own error for that, since such a client cannot read TLS's.

use std::{io, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// The first byte of HTTP/2's preface, and of HTTP/1's POST. A TLS record of a handshake begins with 0x16.
const FIRST_BYTE: u8 = b'P';
/// The connection's preface (RFC 9113, 3.4), and the header of each frame behind it.
const PREFACE_BYTES: usize = 24;
const HEADER_BYTES: usize = 9;
/// The type of the frame that begins a call, and the most that a frame has unless the other end was allowed more.
const HEADERS: u8 = 1;
const MOST_FRAME_BYTES: u64 = 16 * 1024;
/// How long the first call is waited for. A client whose call is on its way learns why it failed; one that has not called yet would
/// learn only that the connection is gone.
const FOR_A_CALL: Duration = Duration::from_secs(1);
const WHY: &[u8] = b"this server speaks TLS";
/// GOAWAY's error code for it (RFC 9113, 7).
const INADEQUATE_SECURITY: u8 = 0xc;

/// Whether a connection that begins with this byte is one that is not encrypted.
pub(super) fn is_unencrypted(first: u8) -> bool {
    first == FIRST_BYTE
}

/// Says so to the other end, and returns the error for the log. It goes on until the other end hangs up, or for a while: a socket that
/// is closed with unread bytes takes back what it has sent.
pub(super) async fn turn_away(mut socket: TcpStream) -> io::Error {
    let said = async {
        socket.write_all(&SETTINGS).await?;
        // Without a call it is said all the same.
        let _ = timeout(FOR_A_CALL, first_call(&mut socket)).await;
        socket.write_all(&goaway()).await?;
        socket.shutdown().await?;
        while socket.read(&mut [0; 256]).await? > 0 {}
        io::Result::Ok(())
    };
    // How it ends says less than how it began.
    let _ = timeout(2 * FOR_A_CALL, said).await;
    io::Error::new(io::ErrorKind::InvalidData, "the other end speaks without TLS")
}

/// Empty SETTINGS, with which each end of HTTP/2 begins. Some clients call only once they have come.
const SETTINGS: [u8; HEADER_BYTES] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

fn goaway() -> Vec<u8> {
    let length = (8 + WHY.len()) as u8;
    let start =
        [0, 0, length, 7, 0, 0, 0, 0, 0, /* no stream */ 0, 0, 0, 0, 0, 0, 0, INADEQUATE_SECURITY];
    [&start[..], WHY].concat()
}

/// Reads until a call has begun.
async fn first_call(socket: &mut TcpStream) -> io::Result<()> {
    socket.read_exact(&mut [0; PREFACE_BYTES]).await?;
    loop {
        let mut header = [0; HEADER_BYTES];
        socket.read_exact(&mut header).await?;
        let bytes = u64::from(u32::from_be_bytes([0, header[0], header[1], header[2]]));
        if header[3] == HEADERS || bytes > MOST_FRAME_BYTES {
            return Ok(());
        }
        tokio::io::copy(&mut (&mut *socket).take(bytes), &mut tokio::io::sink()).await?;
    }
}
