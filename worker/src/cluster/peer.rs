//! Connections of a server: one for control, several for data. The session's `Cluster` keeps the connections until the
//! session ends.

use std::{
    future::{Future, ready},
    io,
    time::Duration,
};

use longshore_proto::{
    Fault,
    limits::{MAX_CONTROL_MESSAGE_BYTES, MAX_TRAINER_STATE_BYTES},
};
use longshore_wire::{
    Channel,
    dial::{CONNECT, KEEP_ALIVE},
    direct::Taps,
    tls::{Credentials, Untrusted},
    v1::{
        DescribeRequest, DescribeResponse, admin_client::AdminClient, tensors_client::TensorsClient,
        training_client::TrainingClient,
    },
};
use tonic::{Response, Status};

use super::{address::Address, pace::Pace, retry::Backoff, waits::LONG};
use crate::{
    error::{self, Result, Unreachable},
    host::{self, Instant},
};

/// Longest call to a dead server: missing answers to pings end it. The server of a longer call was alive.
pub(super) const SILENCE: Duration = KEEP_ALIVE.saturating_mul(2).saturating_add(CONNECT);

/// A data connection. Large answers may bypass HTTP/2. Clones are cheap.
#[derive(Clone)]
pub(crate) struct Connection {
    pub(crate) channel: Channel,
    pub(crate) taps: Taps,
}

/// A server's connections. Clones are cheap.
#[derive(Clone)]
pub(crate) struct Peer {
    /// The address as the user wrote it, for errors.
    pub(crate) address: String,
    control: Channel,
    data: Vec<Connection>,
}

impl Peer {
    /// Opens one control and `connections` data connections, retrying until `end`.
    pub(super) async fn connect(
        address: &str,
        credentials: Option<&Credentials>,
        connections: usize,
        pace: Option<&Pace>,
        (start, end): (Instant, Instant),
    ) -> Result<Peer> {
        if let Some(simulated) = host::entered() {
            let connect = || {
                let channel = simulated.connect(address);
                ready(channel.ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionRefused)))
            };
            let channel = dial(address, start, end, connect).await?;
            return Ok(Peer::without_sockets(address, connections, &channel));
        }
        let checked = Address::new(address, credentials)?;
        let control = dial(address, start, end, || checked.connect()).await?;
        let mut data = Vec::with_capacity(connections);
        for _ in 0..connections {
            let taps = Taps::default();
            let connect = || checked.connect_with(taps.clone(), pace);
            data.push(Connection { channel: dial(address, start, end, connect).await?, taps });
        }
        Ok(Peer { address: address.into(), control, data })
    }

    /// Returns a peer whose connections are all the same channel.
    pub(super) fn without_sockets(address: &str, connections: usize, channel: &Channel) -> Peer {
        let data = || Connection { channel: channel.clone(), taps: Taps::default() };
        let data = (0..connections).map(|_| data()).collect();
        Peer { address: address.into(), control: channel.clone(), data }
    }

    pub(crate) fn training(&self) -> TrainingClient<Channel> {
        // The largest answer is a commit with the trainer's state.
        TrainingClient::new(self.control.clone()).max_decoding_message_size(4 * MAX_TRAINER_STATE_BYTES)
    }

    pub(crate) fn admin(&self) -> AdminClient<Channel> {
        AdminClient::new(self.control.clone()).max_decoding_message_size(MAX_CONTROL_MESSAGE_BYTES)
    }

    /// Returns a data connection, for calls whose payloads bypass tonic's codec.
    pub(crate) fn data(&self, connection: usize) -> Connection {
        self.data[connection % self.data.len()].clone()
    }

    pub(crate) fn tensors(&self, connection: usize) -> TensorsClient<Channel> {
        TensorsClient::new(self.data(connection).channel)
    }
}

/// Fetches a job's description in parts, of any length.
pub async fn whole(
    mut admin: AdminClient<Channel>,
    request: DescribeRequest,
) -> Result<Response<DescribeResponse>, Status> {
    let mut parts = admin.describe_in_parts(request).await?.into_inner();
    let mut whole = parts.message().await?.unwrap_or_default();
    while let Some(part) = parts.message().await? {
        whole.join(part);
    }
    Ok(Response::new(whole))
}

async fn dial<Dialling, Failure>(
    address: &str,
    start: Instant,
    end: Instant,
    connect: impl Fn() -> Dialling,
) -> Result<Channel>
where
    Dialling: Future<Output = std::result::Result<Channel, Failure>>,
    Failure: std::error::Error + 'static,
{
    let (mut backoff, mut said) = (Backoff::new(), false);
    loop {
        let attempt = host::timeout_at(end, connect()).await;
        let cause = match attempt {
            Ok(Ok(channel)) => return Ok(channel),
            Ok(Err(error)) => {
                if let Some(fault) = untrusted(&error) {
                    return Err(error::Untrusted { server: address.into(), fault }.into());
                }
                with_sources(&error)
            }
            Err(_) => "no answer".into(),
        };
        tracing::debug!(server = address, cause, "connecting failed, trying again");
        if start.elapsed() >= LONG && !std::mem::replace(&mut said, true) {
            let left = end.duration_since(Instant::now()).as_secs_f64();
            tracing::warn!(
                server = address,
                cause,
                "still waiting for a server, for {left:.0} s more at most"
            );
        }
        if !backoff.pause(end).await {
            return Err(Unreachable { server: address.into(), tried: start.elapsed(), cause }.into());
        }
    }
}

/// Returns the TLS or token fault that made dialling fail, if there was one.
pub fn untrusted(error: &(dyn std::error::Error + 'static)) -> Option<Fault> {
    let chain = std::iter::successors(Some(error), |error| error.source());
    chain.filter_map(|error| error.downcast_ref()).map(|Untrusted(fault)| fault.clone()).next()
}

/// Joins an error's message with its sources: tonic's own message is only "transport error".
pub fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let message = inner.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        source = inner.source();
    }
    text
}
