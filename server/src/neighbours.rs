//! The user at the other end of a loopback connection. Without this check a port is open to all users of this host.
//!
//! The kernel's table of sockets names each socket's user. A connection over loopback has both ends in one network
//! namespace. So the table of this process's namespace has the peer's socket.

use std::{
    fs, io,
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink::SOCK_DIAG, recv, send,
        socket_with,
    },
};
use tokio::net::{TcpListener, TcpStream};

use crate::{accept::Accept, connections::Origin};

/// Tables to read where the kernel has no sock_diag, or where the service may not use AF_NETLINK.
const TABLES: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];

/// Message type of a request and of its answer, and the flag of a request (linux/sock_diag.h, linux/netlink.h).
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
/// Length of a netlink message's header.
const HEADER: usize = 16;
const IPPROTO_TCP: u8 = 6;
const ESTABLISHED: u8 = 1;
const ANY_STATE: u32 = u32::MAX;
/// Cookie that stands for any socket.
const NO_COOKIE: [u8; 8] = [0xff; 8];

/// A socket in the kernel's table.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    state: u8,
    user: u32,
    /// 0 once no process has the socket open. The table then names root as its user.
    inode: u64,
}

/// A listener on loopback that finds each connection's user.
pub(crate) struct Loopback {
    listener: TcpListener,
    table: Table,
}

impl Loopback {
    pub(crate) fn new(listener: TcpListener) -> Loopback {
        Loopback { listener, table: Table::open() }
    }
}

impl Accept for Loopback {
    type Socket = TcpStream;

    async fn accept(&mut self) -> io::Result<(TcpStream, Origin)> {
        let (socket, origin) = Accept::accept(&mut self.listener).await?;
        let Origin::Host(address) = origin else { return Ok((socket, origin)) };
        let user = self.table.user_of(&socket);
        Ok((socket, Origin::Neighbour { address, user }))
    }
}

/// The table of sockets.
struct Table {
    /// None where the kernel has no sock_diag.
    diag: Option<OwnedFd>,
    /// Number of the last request, which the kernel repeats in the answer.
    requests: u32,
}

impl Table {
    fn open() -> Table {
        let opened =
            socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, Some(SOCK_DIAG));
        let diag = opened.inspect_err(|error| tracing::debug!(%error, "no sock_diag")).ok();
        Table { diag, requests: 0 }
    }

    /// Returns the user whose process has the other end open. None if no process has the other end open, or if the
    /// kernel does not tell.
    fn user_of(&mut self, socket: &TcpStream) -> Option<u32> {
        let (peer, here) = (canonical(socket.peer_addr().ok()?), canonical(socket.local_addr().ok()?));
        let found = match self.ask(peer, here) {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(%error, "sock_diag does not answer");
                listed(peer, here)
            }
        }?;
        // A connection that is still open holds its addresses, so the socket found is no later connection's.
        let is_open = socket.peer_addr().is_ok();
        (is_open && found.state == ESTABLISHED && found.inode != 0).then_some(found.user)
    }

    /// Asks the kernel for the socket with these two addresses.
    fn ask(&mut self, local: SocketAddr, remote: SocketAddr) -> Result<Option<Found>, Errno> {
        let diag = self.diag.as_ref().ok_or(Errno::PROTONOSUPPORT)?;
        self.requests = self.requests.wrapping_add(1);
        send(diag, &request(self.requests, local, remote), SendFlags::empty())?;
        let mut answer = [0_u8; 512];
        // The kernel answers within `send`.
        let (bytes, _) = recv(diag, &mut answer, RecvFlags::DONTWAIT)?;
        parse(self.requests, &answer[..bytes.min(answer.len())])
    }
}

/// Returns an IPv4 address that is written as IPv6 in its IPv4 form.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Builds an `inet_diag_req_v2`.
fn request(number: u32, local: SocketAddr, remote: SocketAddr) -> Vec<u8> {
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let mut request = Vec::with_capacity(HEADER + 56);
    request.extend(72_u32.to_ne_bytes());
    request.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend(NLM_F_REQUEST.to_ne_bytes());
    request.extend(number.to_ne_bytes());
    // The kernel knows the port of the sender.
    request.extend([0; 4]);
    request.extend([family.as_raw() as u8, IPPROTO_TCP, 0, 0]);
    request.extend(ANY_STATE.to_ne_bytes());
    request.extend(local.port().to_be_bytes());
    request.extend(remote.port().to_be_bytes());
    for address in [local, remote] {
        let mut octets = [0; 16];
        match address.ip() {
            IpAddr::V4(ip) => octets[..4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => octets = ip.octets(),
        }
        request.extend(octets);
    }
    // Any interface.
    request.extend([0; 4]);
    request.extend(NO_COOKIE);
    request
}

/// Parses an `inet_diag_msg`, or the error in its place.
fn parse(number: u32, answer: &[u8]) -> Result<Option<Found>, Errno> {
    let word = |at: usize| {
        let bytes = answer.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u32::from_ne_bytes).ok_or(Errno::BADMSG)
    };
    if word(8)? != number {
        return Err(Errno::BADMSG);
    }
    match u16::from_ne_bytes([answer[4], answer[5]]) {
        // Family, state and 50 bytes of addresses come first; then a time and two lengths.
        SOCK_DIAG_BY_FAMILY => {
            let (user, inode) = (word(HEADER + 64)?, word(HEADER + 68)?.into());
            Ok(Some(Found { state: answer[HEADER + 1], user, inode }))
        }
        NLMSG_ERROR => match Errno::from_raw_os_error((word(HEADER)? as i32).wrapping_neg()) {
            Errno::NOENT => Ok(None),
            error => Err(error),
        },
        _ => Err(Errno::BADMSG),
    }
}

/// Looks a socket up in the tables of `/proc`. A socket of IPv6 may list an address of IPv4 in its IPv6 form.
fn listed(local: SocketAddr, remote: SocketAddr) -> Option<Found> {
    let mapped = |address: SocketAddr| match address.ip() {
        IpAddr::V4(ip) => SocketAddr::new(ip.to_ipv6_mapped().into(), address.port()),
        IpAddr::V6(_) => address,
    };
    let ends = [[local, remote], [mapped(local), mapped(remote)]].map(|ends| ends.map(hexadecimal));
    let tables = TABLES.map(|path| fs::read_to_string(path).unwrap_or_default());
    ends.iter().zip(&tables).find_map(|(ends, table)| entry(table, ends))
}

/// Finds the socket with these two addresses in a table.
fn entry(table: &str, [local, remote]: &[String; 2]) -> Option<Found> {
    let mut lines = table.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    let found = lines.find(|line| line.get(1) == Some(&&**local) && line.get(2) == Some(&&**remote))?;
    Some(Found {
        state: u8::from_str_radix(found.get(3)?, 16).ok()?,
        user: found.get(7)?.parse().ok()?,
        inode: found.get(9)?.parse().ok()?,
    })
}

/// Formats an address as the tables do: words of 32 bits as this machine reads them.
fn hexadecimal(address: SocketAddr) -> String {
    let octets = match address.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let words = octets.chunks_exact(4).map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
    let words: String = words.map(|word| format!("{word:08X}")).collect();
    format!("{words}:{:04X}", address.port())
}

#[cfg(test)]
mod tests {
    use rustix::process::geteuid;
    use tokio::io::AsyncWriteExt;

    use super::*;

    fn both() -> [Table; 2] {
        [Table::open(), Table { diag: None, requests: 0 }]
    }

    async fn pair(listener: &TcpListener, dial: &str) -> (TcpStream, TcpStream) {
        let port = listener.local_addr().unwrap().port();
        let dialled = TcpStream::connect(format!("{dial}:{port}")).await.unwrap();
        (dialled, TcpListener::accept(listener).await.unwrap().0)
    }

    #[tokio::test]
    async fn the_user_of_an_open_connection_is_found_in_both_tables() {
        let own = geteuid().as_raw();
        for (listen, dial) in
            [("127.0.0.1:0", "127.0.0.1"), ("127.0.0.1:0", "[::ffff:127.0.0.1]"), ("[::1]:0", "[::1]")]
        {
            // A host may have no IPv6.
            let Ok(listener) = TcpListener::bind(listen).await else { continue };
            let (_dialled, accepted) = pair(&listener, dial).await;
            assert_eq!(both().map(|mut table| table.user_of(&accepted)), [Some(own); 2], "{dial}");
        }
    }

    /// The table names root as the user of a socket that no process has open. Its bytes may still wait to be read.
    #[tokio::test]
    async fn a_caller_that_has_hung_up_is_nobody() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (mut dialled, accepted) = pair(&listener, "127.0.0.1").await;
        dialled.write_all(b"a call").await.unwrap();
        drop(dialled);
        assert_eq!(both().map(|mut table| table.user_of(&accepted)), [None; 2]);
    }

    #[test]
    fn a_malformed_answer_is_an_error() {
        let answer = |kind: u8, rest: &[u8]| {
            [&[0, 0, 0, 0, kind, 0, 0, 0][..], &7_u32.to_ne_bytes(), &[0; 4], rest].concat()
        };
        let error = |errno: i32| answer(2, &(-errno).to_ne_bytes());
        assert_eq!((parse(7, &error(2)), parse(7, &error(1))), (Ok(None), Err(Errno::PERM)));
        for other in [vec![], answer(20, &[0; 70]), answer(3, &[0; 80])] {
            assert_eq!(parse(7, &other), Err(Errno::BADMSG));
        }
        assert_eq!(parse(8, &error(2)), Err(Errno::BADMSG), "of an earlier request");
    }
}
