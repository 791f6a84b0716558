//! Limits of the host: memory copies, and bytes through bare sockets with the same send buffers.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    thread,
};

use longshore_proto::limits::CHUNK_BYTES;
use longshore_wire::direct::{LOOPBACK_BYTES, UNIX_BYTES};
use rustix::net::sockopt::set_socket_send_buffer_size;

use super::{
    case::{Case, Sample},
    tls,
};

pub(super) fn cases(connections: usize, bytes: usize) -> anyhow::Result<Vec<Case>> {
    let mut lanes = Lanes::new(connections, bytes);
    let memcpy = Case::new("memcpy", None, move || lanes.run(vec![(); connections], copy_all));
    let folder = tempfile::tempdir()?;
    tls::make(folder.path())?;
    let tls = || tls::pair(&folder.path().join(tls::SERVER), tcp_pair()?);
    Ok(vec![
        memcpy,
        sockets("raw tcp", (connections, bytes), tcp_pair)?,
        sockets("raw unix", (connections, bytes), unix_pair)?,
        sockets("raw tls", (connections, bytes), tls)?,
    ])
}

/// Returns the case of one pair of sockets for each connection.
fn sockets<S: Write + Send + 'static, R: Read + Send + 'static>(
    name: &'static str,
    (connections, bytes): (usize, usize),
    pair: impl Fn() -> anyhow::Result<(S, R)>,
) -> anyhow::Result<Case> {
    let mut lanes = Lanes::new(connections, bytes);
    let mut pairs = (0..connections).map(|_| pair()).collect::<anyhow::Result<Vec<_>>>()?;
    Ok(Case::new(name, None, move || {
        let pairs = pairs.iter_mut().map(|(sender, receiver)| (sender, receiver)).collect();
        lanes.run(pairs, |(sender, receiver), source, target| send_all(sender, receiver, source, target))
    }))
}

/// Source and target of each connection. Together they are as large as a real transfer, so they fit in no cache.
struct Lanes(Vec<(Vec<u8>, Vec<u8>)>);

impl Lanes {
    fn new(connections: usize, bytes: usize) -> Lanes {
        let part = bytes / connections;
        Lanes((0..connections).map(|lane| (vec![lane as u8 + 1; part], vec![0; part])).collect())
    }

    fn run<T: Send>(
        &mut self,
        transports: Vec<T>,
        move_all: impl Fn(T, &[u8], &mut [u8]) -> anyhow::Result<()> + Sync,
    ) -> anyhow::Result<Sample> {
        let mut sample = Sample::default();
        let bytes = self.0.iter().map(|(source, _)| source.len()).sum();
        let move_all = &move_all;
        sample.time(bytes, || {
            thread::scope(|scope| {
                let mut lanes = Vec::new();
                for (transport, (source, target)) in transports.into_iter().zip(&mut self.0) {
                    lanes.push(scope.spawn(move || move_all(transport, source, target)));
                }
                lanes.into_iter().try_for_each(|lane| lane.join().expect("a lane does not panic"))
            })
        })?;
        Ok(sample)
    }
}

fn copy_all((): (), source: &[u8], target: &mut [u8]) -> anyhow::Result<()> {
    for (source, target) in source.chunks(CHUNK_BYTES).zip(target.chunks_mut(CHUNK_BYTES)) {
        target.copy_from_slice(source);
    }
    Ok(())
}

fn send_all(
    sender: &mut (impl Write + Send),
    receiver: &mut impl Read,
    source: &[u8],
    target: &mut [u8],
) -> anyhow::Result<()> {
    thread::scope(|scope| {
        let sending =
            scope.spawn(move || source.chunks(CHUNK_BYTES).try_for_each(|chunk| sender.write_all(chunk)));
        receiver.read_exact(target)?;
        Ok(sending.join().expect("sending does not panic")?)
    })
}

fn tcp_pair() -> anyhow::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let sender = TcpStream::connect(listener.local_addr()?)?;
    let (receiver, _) = listener.accept()?;
    sender.set_nodelay(true)?;
    set_socket_send_buffer_size(&sender, LOOPBACK_BYTES)?;
    Ok((sender, receiver))
}

fn unix_pair() -> anyhow::Result<(UnixStream, UnixStream)> {
    let pair = UnixStream::pair()?;
    set_socket_send_buffer_size(&pair.0, UNIX_BYTES)?;
    Ok(pair)
}
