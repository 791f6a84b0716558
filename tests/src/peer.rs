//! An HTTP/2 peer that sends single frames, including frames that no library sends. Tests use it to check
//! that a server survives them.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream},
    time::{Duration, Instant},
};

use rustix::net::{self, AddressFamily, SocketType};

use crate::process::DEADLINE;

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const RESET: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GO_AWAY: u8 = 7;
pub const CONTINUATION: u8 = 9;

pub const END_STREAM: u8 = 1;
pub const ACK: u8 = 1;
pub const END_HEADERS: u8 = 4;

/// The error code of a GOAWAY that reports no error.
pub const NO_ERROR: u32 = 0;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Longest time for a write. A server that reads nothing for 2 s counts as holding the peer back.
const PATIENCE: Duration = Duration::from_secs(2);

/// A received frame.
#[derive(Debug)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

/// A connection, over TCP or over another socket.
pub struct Peer<S = TcpStream> {
    pub socket: S,
}

/// Encodes a frame. `len` may differ from the payload's length.
pub fn frame_of(len: usize, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = (len as u32).to_be_bytes()[1..].to_vec();
    bytes.extend_from_slice(&[kind, flags]);
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    frame_of(payload.len(), kind, flags, stream, payload)
}

/// Returns the HPACK headers of a call.
pub fn call(path: &str) -> Vec<u8> {
    call_as(path, None)
}

/// Returns the same headers with a token, if given.
pub fn call_as(path: &str, token: Option<&str>) -> Vec<u8> {
    // The static table of HPACK has POST, http, and the names of path, authority, content type and authorization.
    let mut bytes = vec![0x83, 0x86];
    let mut literal = |name: &[u8], value: &str| {
        bytes.extend_from_slice(name);
        bytes.push(value.len() as u8);
        bytes.extend_from_slice(value.as_bytes());
    };
    literal(&[0x04], path);
    literal(&[0x01], "peer");
    literal(&[0x0F, 0x10], "application/grpc");
    literal(b"\x00\x02te", "trailers");
    if let Some(token) = token {
        literal(&[0x0F, 0x08], &format!("Bearer {token}"));
    }
    bytes
}

fn ready(socket: TcpStream) -> io::Result<TcpStream> {
    socket.set_nodelay(true)?;
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.set_read_timeout(Some(DEADLINE))?;
    Ok(socket)
}

impl Peer {
    /// Opens a connection and sends nothing.
    pub fn silent(address: &str) -> io::Result<Peer> {
        let address: SocketAddr = address.parse().expect("a server's address");
        Ok(Peer { socket: ready(TcpStream::connect_timeout(&address, DEADLINE)?)? })
    }

    pub fn connect(address: &str) -> io::Result<Peer> {
        Peer::over(Peer::silent(address)?.socket)
    }

    /// Connects from the loopback address 127.200.x.y, where x.y are the bytes of `host`. The server takes each such
    /// address for another host.
    pub fn from_host(host: u16, address: &str) -> io::Result<Peer> {
        let [high, low] = host.to_be_bytes();
        let socket = net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
        net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::new(127, 200, high, low), 0))?;
        net::connect(&socket, &address.parse::<SocketAddrV4>().expect("a server's address"))?;
        Peer::over(ready(TcpStream::from(socket))?)
    }
}

impl<S: Read + Write> Peer<S> {
    /// Sends the HTTP/2 preface and settings on a socket.
    pub fn over(socket: S) -> io::Result<Peer<S>> {
        let mut peer = Peer { socket };
        peer.send(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat())?;
        Ok(peer)
    }

    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.socket.write_all(bytes)
    }

    /// Returns the next frame, or None after the connection's end.
    pub fn next_frame(&mut self) -> io::Result<Option<Frame>> {
        let mut header = [0; 9];
        match self.socket.read_exact(&mut header) {
            Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => {
                return Ok(None);
            }
            other => other?,
        }
        let [a, b, c, kind, flags, stream @ ..] = header;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        self.socket.read_exact(&mut payload)?;
        Ok(Some(Frame { kind, flags, stream: u32::from_be_bytes(stream), payload }))
    }

    /// Reads until the connection ends. Returns the code of GOAWAY, if one came.
    ///
    /// # Panics If the connection does not end.
    pub fn end(mut self) -> Option<u32> {
        let mut code = None;
        loop {
            match self.next_frame() {
                Ok(Some(frame)) if frame.kind == GO_AWAY => code = Some(code_of(&frame)),
                Ok(Some(_)) => {}
                Ok(None) => return code,
                Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("the connection does not end"),
                Err(_) => return code,
            }
        }
    }

    /// Sends pieces until all are sent or the server ends the connection. Returns the number of bytes sent.
    pub fn flood(&mut self, pieces: impl Iterator<Item = Vec<u8>>) -> usize {
        let mut sent = 0;
        for piece in pieces {
            if self.send(&piece).is_err() {
                break;
            }
            sent += piece.len();
        }
        sent
    }

    /// Waits until the server has read everything sent before. Answers the server's pings meanwhile: a peer
    /// without answers counts as dead. Returns false if the server ends the connection instead.
    pub fn is_alive(&mut self) -> bool {
        if self.send(&frame(PING, 0, 0, b"are you?")).is_err() {
            return false;
        }
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            match self.next_frame() {
                Ok(Some(frame)) if frame.kind == PING && frame.flags & ACK != 0 => return true,
                Ok(Some(frame)) if frame.kind == GO_AWAY => return false,
                Ok(Some(asked)) if asked.kind == PING => {
                    if self.send(&frame(PING, ACK, 0, &asked.payload)).is_err() {
                        return false;
                    }
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return false,
            }
        }
        false
    }

    /// Lists the server's jobs. Returns whether an answer came.
    pub fn lists_jobs(&mut self) -> bool {
        let headers = call("/longshore.v1.Admin/ListJobs");
        let request =
            [frame(HEADERS, END_HEADERS, 1, &headers), frame(DATA, END_STREAM, 1, &[0; 5])].concat();
        if self.send(&request).is_err() {
            return false;
        }
        loop {
            match self.next_frame() {
                Ok(Some(frame)) if frame.stream == 1 && frame.flags & END_STREAM != 0 => {
                    return frame.kind == HEADERS;
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return false,
            }
        }
    }
}

/// Returns the error code of a GOAWAY frame.
pub fn code_of(frame: &Frame) -> u32 {
    frame.payload.get(4..8).and_then(|code| code.try_into().ok()).map_or(u32::MAX, u32::from_be_bytes)
}
