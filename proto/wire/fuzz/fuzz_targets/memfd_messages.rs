//! Plays a hostile process at the other end of a link. The process sends any packets with any descriptors, and names
//! any places in its memories.

#![no_main]

use std::{
    fs::File,
    io::IoSlice,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::OnceLock,
};

use libfuzzer_sys::{arbitrary, arbitrary::Arbitrary, fuzz_target};
use longshore_memory::Foreign;
use longshore_wire::{
    memfd::{Listener, Socket},
    v1::{MemfdMemory, MemfdPlace, MemfdRequest, memfd_request::Request},
};
use prost::Message;
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
        SocketType, connect, sendmsg, socket_with,
    },
};
use tokio::runtime::Runtime;

const MOST: u64 = 1 << 20;

#[derive(Debug, Arbitrary)]
enum Packet {
    /// Any bytes as a packet.
    Raw(Vec<u8>, Vec<Passed>),
    /// A valid message that describes a memory. The size in the message may differ from the descriptor's.
    Memory(u64, Vec<Passed>),
    /// A place in one of the taken memories, as a Push names it. The target checks the place without sending it.
    Place { memory: u8, offset: u64, bytes: u64, small: bool },
}

#[derive(Debug, Arbitrary)]
enum Passed {
    Memfd { bytes: u32, shrink: bool, grow: bool },
    Zero,
    Pipe,
}

impl Passed {
    fn open(&self) -> OwnedFd {
        match self {
            Passed::Memfd { bytes, shrink, grow } => {
                let file = memfd_create("fuzz", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
                ftruncate(&file, u64::from(*bytes) % (2 * MOST)).unwrap();
                let mut seals = SealFlags::empty();
                seals.set(SealFlags::SHRINK, *shrink);
                seals.set(SealFlags::GROW, *grow);
                fcntl_add_seals(&file, seals).unwrap();
                file
            }
            Passed::Zero => File::open("/dev/zero").unwrap().into(),
            Passed::Pipe => rustix::pipe::pipe().unwrap().0,
        }
    }
}

/// Returns the listener and its name, made once for the process.
fn host() -> &'static (Runtime, Listener, String) {
    static HOST: OnceLock<(Runtime, Listener, String)> = OnceLock::new();
    HOST.get_or_init(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let name = format!("longshore-fuzz-{}", std::process::id());
        let listener = runtime.block_on(async { Listener::bind(name.as_bytes()).unwrap() });
        (runtime, listener, name)
    })
}

fn raw_socket(name: &str) -> OwnedFd {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    socket
}

fn send(socket: &OwnedFd, bytes: &[u8], passed: &[Passed]) {
    let files: Vec<OwnedFd> = passed.iter().take(6).map(Passed::open).collect();
    let descriptors: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(6))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    }
    // An empty packet would end the connection, so a zero byte replaces it.
    let bytes = if bytes.is_empty() { &[0] } else { bytes };
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

async fn receive(socket: &Socket, memories: &mut Vec<Foreign>) {
    let Ok(packet) = socket.receive::<MemfdRequest>().await else { return };
    let packet = packet.expect("the other end is open");
    if let (Some(Request::Memory(memory)), Some(descriptor)) = (packet.message.request, packet.descriptor)
        && let Ok(memory) = Foreign::map(&descriptor, memory.bytes, MOST)
    {
        memories.push(memory);
    }
}

/// Checks that a place is refused, or can be read to its last byte.
fn look(memories: &[Foreign], place: &MemfdPlace) {
    let Some(memory) = memories.get(place.memory as usize) else { return };
    let inside = u128::from(place.offset) + u128::from(place.bytes) <= u128::from(memory.len());
    assert_eq!(memory.holds(place.offset, place.bytes), inside);
    if inside {
        // Nobody writes to the memory any more, so two copies must be equal.
        let mut copies = [vec![1; place.bytes as usize], vec![2; place.bytes as usize]];
        copies.iter_mut().for_each(|copy| memory.source(place.offset, place.bytes).copy_to(copy));
        assert_eq!(copies[0], copies[1]);
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fuzz_target!(|packets: Vec<Packet>| {
    let (runtime, listener, name) = host();
    let before = descriptors();
    runtime.block_on(async {
        let client = raw_socket(name);
        let server = listener.accept().await.unwrap();
        let mut memories = Vec::new();
        for packet in packets.iter().take(16) {
            match packet {
                Packet::Raw(bytes, passed) => send(&client, bytes, passed),
                Packet::Memory(bytes, passed) => {
                    let bytes = match passed.first() {
                        // In half of the cases the message's size is that of the descriptor.
                        Some(Passed::Memfd { bytes: size, .. }) if bytes % 2 == 0 => {
                            u64::from(*size) % (2 * MOST)
                        }
                        _ => *bytes,
                    };
                    let request = MemfdRequest { request: Some(Request::Memory(MemfdMemory { bytes })) };
                    send(&client, &request.encode_to_vec(), passed);
                }
                &Packet::Place { memory, offset, bytes, small } => {
                    let (offset, bytes) = if small { (offset % MOST, bytes % MOST) } else { (offset, bytes) };
                    look(
                        &memories,
                        &MemfdPlace { memory: memory.into(), offset, bytes, ..Default::default() },
                    );
                    continue;
                }
            }
            receive(&server, &mut memories).await;
        }
    });
    assert_eq!(descriptors(), before, "every descriptor that came is closed or kept by what holds it");
});
