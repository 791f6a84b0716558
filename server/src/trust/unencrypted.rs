//! Answer of a TLS port to unencrypted HTTP/2: HTTP/2's own error, since such a client cannot read TLS alerts.

use std::{io, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// First byte of HTTP/2's preface, and of HTTP/1's POST. A TLS handshake record begins with 0x16.
const FIRST_BYTE: u8 = b'P';
/// Length of the connection's preface (RFC 9113, 3.4), and of each frame header behind it.
const PREFACE_BYTES: usize = 24;
const HEADER_BYTES: usize = 9;
/// Type of the frame that begins a call, and the default limit of a frame's length.
const HEADERS: u8 = 1;
const MOST_FRAME_BYTES: u64 = 16 * 1024;
/// Longest wait for the first call. A client with a call in flight learns why it failed. A client without a call would
/// only see the connection close.
const FOR_A_CALL: Duration = Duration::from_secs(1);
const WHY: &[u8] = b"this server speaks TLS";
/// GOAWAY error code INADEQUATE_SECURITY (RFC 9113, 7).
const INADEQUATE_SECURITY: u8 = 0xc;

/// Returns whether a connection that begins with this byte is unencrypted.
pub(super) fn is_unencrypted(first: u8) -> bool {
    first == FIRST_BYTE
}

/// Sends the error to the peer, and returns the error for the log. Then reads until the peer hangs up, for at most 2 s.
/// Closing a socket with unread bytes would discard the sent error.
pub(super) async fn turn_away(mut socket: TcpStream) -> io::Error {
    let said = async {
        socket.write_all(&SETTINGS).await?;
        // Without a call the error is sent all the same.
        let _ = timeout(FOR_A_CALL, first_call(&mut socket)).await;
        socket.write_all(&goaway()).await?;
        socket.shutdown().await?;
        while socket.read(&mut [0; 256]).await? > 0 {}
        io::Result::Ok(())
    };
    // The outcome of sending is not logged; the first byte already tells the cause.
    let _ = timeout(2 * FOR_A_CALL, said).await;
    io::Error::new(io::ErrorKind::InvalidData, "the other end speaks without TLS")
}

/// Empty SETTINGS, which each end of HTTP/2 sends first. Some clients call only after receiving them.
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
