//! Options of a session: servers, job, rank, deadlines, transport.

use std::{
    fmt,
    path::PathBuf,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use longshore_proto::{
    Fault, Incarnation, JobSpec, Layout, Rank,
    limits::{DATA_CONNECTIONS, MAX_DEADLINE_MS, MAX_SERVERS},
};
use tokio::runtime::Handle;

use super::runtime::Interrupt;
use crate::device::Budget;

/// The route of payloads between this rank and its servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Shared memory with each server of the same host and user, sockets with the others.
    #[default]
    Auto,
    /// TCP alone.
    Tcp,
    /// Unix sockets alone.
    Unix,
    /// Shared memory with every server. A server without shared memory is an error. Weights of the `shm` tier still
    /// come through the socket.
    Memfd,
}

impl Transport {
    const ALL: [(Transport, &'static str); 4] = [
        (Transport::Auto, "auto"),
        (Transport::Tcp, "tcp"),
        (Transport::Unix, "unix"),
        (Transport::Memfd, "memfd"),
    ];

    /// Returns the transport to an embedded server, whose only socket is a Unix socket.
    #[must_use]
    pub fn of_embedded(self) -> Transport {
        if self == Transport::Tcp { Transport::Unix } else { self }
    }

    pub(crate) fn may_share(self) -> bool {
        matches!(self, Transport::Auto | Transport::Memfd)
    }

    fn allows(self, address: &str) -> bool {
        match self {
            Transport::Auto | Transport::Memfd => true,
            Transport::Tcp => !address.starts_with("unix:"),
            Transport::Unix => address.starts_with("unix:"),
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            Transport::ALL.iter().find(|(transport, _)| transport == self).map_or("", |(_, name)| name),
        )
    }
}

impl FromStr for Transport {
    type Err = Fault;

    fn from_str(name: &str) -> Result<Transport, Fault> {
        let found = Transport::ALL.iter().find(|(_, known)| *known == name);
        found.map(|(transport, _)| *transport).ok_or_else(|| {
            Fault::invalid("transport", format!("{name:?}"), "auto, tcp, unix or memfd", "name one of them")
        })
    }
}

/// Next incarnation of a process; 0 before its first session. All sessions of the process share the value. So a later
/// session never replaces a newer process that has taken the rank.
#[derive(Clone, Debug, Default)]
pub struct Process(Arc<AtomicU64>);

impl Process {
    pub(crate) fn has_begun(&self) -> bool {
        self.0.load(Relaxed) != 0
    }

    /// Sets the first incarnation, unless another session of the process has.
    pub(crate) fn begin(&self, first: u64) {
        let _ = self.0.compare_exchange(0, first.max(1), Relaxed, Relaxed);
    }

    /// Returns true if `newest` belongs to a later process: this process has begun, and gives smaller numbers.
    pub(crate) fn is_replaced_by(&self, newest: u64) -> bool {
        self.has_begun() && newest >= self.0.load(Relaxed)
    }

    pub(crate) fn take(&self) -> Incarnation {
        Incarnation(self.0.fetch_add(1, Relaxed))
    }
}

/// Options of a session. Start from [`Options::new`], and change single fields.
#[derive(Clone, Debug)]
pub struct Options {
    /// `host:port`, `http://host:port`, `https://host:port` or, on the same host, `unix:/path`. Every rank has the
    /// same list in the same order.
    pub servers: Vec<String>,
    /// Folder of TLS files: `ca.pem`, and `client.pem` with `client.key` or `token`. All TCP connections are then
    /// encrypted.
    pub tls_dir: Option<PathBuf>,
    /// Token file that replaces the token of `tls_dir`.
    pub token_file: Option<PathBuf>,
    pub spec: JobSpec,
    pub rank: Rank,
    /// Number of ranks that take part, at most `spec.world_size`. Another number needs a new start of all ranks.
    pub world_size: u32,
    /// Source of this process's incarnations. A session that starts over takes the same value.
    pub process: Process,
    /// The longest wait for an event that is immediate in a healthy job: a connection, another rank, a step.
    pub deadline: Duration,
    /// The longest wait for work on all of the state: upload, checkpoint, restore, state hash.
    pub slow_deadline: Duration,
    /// The longest wait for an operator while the job is paused.
    pub pause_deadline: Duration,
    /// Data connections per server, beside one for control calls. A connection is as fast as the task that frames its
    /// bytes. On two cores 1, 2 and 4 connections took about the same CPU time a GB. With more cores, more
    /// connections pay.
    pub connections: usize,
    /// Chunks (of 1 MiB) that may queue for one data connection before `put` blocks.
    pub in_flight_chunks: usize,
    /// Host memory for weights under way and gradients retained.
    pub host_budget: Budget,
    pub transport: Transport,
    /// For measurements of slow links: bytes a second that all data connections together move in each direction.
    /// Shared memory keeps its speed.
    pub link_bytes_per_s: Option<u64>,
    /// Ends a wait before its deadline.
    pub interrupt: Interrupt,
    /// The runtime of all tasks. With None the session starts a small runtime of its own.
    pub runtime: Option<Handle>,
}

const MAX_CONNECTIONS: usize = 64;
const MAX_IN_FLIGHT_CHUNKS: usize = 4096;
/// At a lower speed a chunk would take longer than the keep-alive timeout.
const MIN_LINK_BYTES_PER_S: u128 = 1_000_000;

impl Options {
    pub fn new(servers: Vec<String>, spec: JobSpec, rank: Rank) -> Options {
        Options {
            servers,
            tls_dir: None,
            token_file: None,
            world_size: spec.world_size,
            spec,
            rank,
            process: Process::default(),
            deadline: Duration::from_secs(60),
            slow_deadline: Duration::from_secs(1800),
            pause_deadline: Duration::from_secs(3600),
            connections: DATA_CONNECTIONS,
            in_flight_chunks: 16,
            host_budget: Budget::unlimited("host memory of the worker"),
            transport: Transport::Auto,
            link_bytes_per_s: None,
            interrupt: Interrupt::default(),
            runtime: None,
        }
    }

    /// Checks every option and lays the parameters out.
    pub(super) fn validate(&self) -> Result<Layout, Fault> {
        let range = |field: &str, value: u128, low: u128, high: u128| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(Fault::invalid(
                format!("options.{field}"),
                value,
                format!("in {low}..={high}"),
                "correct the option",
            ))
        };
        range("servers", self.servers.len() as u128, 1, MAX_SERVERS as u128)?;
        range("world_size", self.world_size.into(), 1, self.spec.world_size.max(1).into())?;
        range("rank", self.rank.0.into(), 0, u128::from(self.world_size) - 1)?;
        range("connections", self.connections as u128, 1, MAX_CONNECTIONS as u128)?;
        range("in_flight_chunks", self.in_flight_chunks as u128, 1, MAX_IN_FLIGHT_CHUNKS as u128)?;
        if let Some(speed) = self.link_bytes_per_s {
            range("link_bytes_per_s", speed.into(), MIN_LINK_BYTES_PER_S, u64::MAX.into())?;
        }
        for (field, wait) in [
            ("deadline, ms", self.deadline),
            ("slow_deadline, ms", self.slow_deadline),
            ("pause_deadline, ms", self.pause_deadline),
        ] {
            range(field, wait.as_millis(), 1, MAX_DEADLINE_MS.into())?;
        }
        for (index, server) in self.servers.iter().enumerate() {
            if !self.transport.allows(server) {
                let value = format!("{} to {server}", self.transport);
                let limit = "tcp to host:port, unix to unix:/path";
                let remedy = "name the server's other address, or use transport auto";
                return Err(Fault::invalid("options.transport", value, limit, remedy));
            }
            if self.servers[..index].contains(server) {
                let field = format!("options.servers[{index}]");
                return Err(Fault::invalid(field, server, "named once", "name each server once"));
            }
        }
        self.spec.validate()
    }
}
