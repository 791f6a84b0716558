//! One server's connections, and how they are dialled.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use longshore_proto::{
    Fault,
    limits::{CHUNK_BYTES, MAX_CONTROL_MESSAGE_BYTES, MAX_TRAINER_STATE_BYTES},
};
use longshore_wire::{
    direct::Taps,
    v1::{
        DescribeRequest, DescribeResponse, admin_client::AdminClient, tensors_client::TensorsClient,
        training_client::TrainingClient,
    },
};
use tonic::{
    Response, Status,
    transport::{Channel, Endpoint},
};

use super::{connector::Connector, pace::Pace, retry::Backoff, waits::LONG};
use crate::error::{Result, Unreachable};

/// The window of a stream. It is above one chunk, so that a chunk is never held up by its own stream's window.
const STREAM_WINDOW_BYTES: u32 = 16 * CHUNK_BYTES as u32;
const CONNECTION_WINDOW_BYTES: u32 = 4 * STREAM_WINDOW_BYTES;
/// The largest frame. It holds a whole chunk, since each frame costs a write and some reads: pulling takes 0.44 s of
/// CPU time a GB with 1 MiB frames, and took 0.58 with 64 KiB.
const FRAME_BYTES: u32 = CHUNK_BYTES as u32;
/// How often a silent peer is pinged, and how long its answer may take. So one that is gone (power loss, a cut cable)
/// is found within twice this.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const CONNECT: Duration = Duration::from_secs(5);
/// If a call was under way for longer than this, its server was alive for some of that time: it had answered pings.
pub(super) const SILENCE: Duration = KEEP_ALIVE.saturating_mul(2).saturating_add(CONNECT);

/// A data connection, whose large answers may come past HTTP/2. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Connection {
    pub(crate) channel: Channel,
    pub(crate) taps: Taps,
}

/// A server's connections. A clone is cheap.
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
        connections: usize,
        pace: Option<&Pace>,
        (start, end): (Instant, Instant),
    ) -> Result<Peer> {
        let endpoint = endpoint(address)?;
        let control = dial(address, start, end, || endpoint.connect()).await?;
        let mut data = Vec::with_capacity(connections);
        for _ in 0..connections {
            let taps = Taps::default();
            let connector = Connector::new(address, CONNECTION_WINDOW_BYTES as usize, taps.clone(), pace);
            let connect = || endpoint.connect_with_connector(connector.clone());
            data.push(Connection { channel: dial(address, start, end, connect).await?, taps });
        }
        Ok(Peer { address: address.into(), control, data })
    }

    pub(crate) fn training(&self) -> TrainingClient<Channel> {
        // A commit with the trainer's state is the largest answer.
        TrainingClient::new(self.control.clone()).max_decoding_message_size(4 * MAX_TRAINER_STATE_BYTES)
    }

    pub(crate) fn admin(&self) -> AdminClient<Channel> {
        AdminClient::new(self.control.clone()).max_decoding_message_size(MAX_CONTROL_MESSAGE_BYTES)
    }

    /// A data connection for calls below the codec.
    pub(crate) fn data(&self, connection: usize) -> Connection {
        self.data[connection % self.data.len()].clone()
    }

    pub(crate) fn tensors(&self, connection: usize) -> TensorsClient<Channel> {
        TensorsClient::new(self.data(connection).channel)
    }
}

/// The address to dial: `host:port`, `http://host:port`, or `unix:/path` for a server on the same host.
pub fn endpoint(address: &str) -> Result<Endpoint, Fault> {
    let invalid = |cause: &str| {
        Fault::invalid(
            "options.servers",
            format!("{address:?}, {cause}"),
            "host:port, http://host:port or unix:/path",
            "correct it",
        )
    };
    let path = address.strip_prefix("unix:");
    if path.is_some_and(|path| !path.starts_with('/')) {
        return Err(invalid("not an absolute path"));
    }
    let whole = path.is_some() || address.contains("://");
    let url = if whole { address.to_string() } else { format!("http://{address}") };
    let endpoint = Endpoint::from_shared(url).map_err(|error| invalid(&error.to_string()))?;
    if path.is_none() && (endpoint.uri().scheme_str() != Some("http") || endpoint.uri().port().is_none()) {
        return Err(invalid("no port, or not http"));
    }
    Ok(endpoint
        .tcp_nodelay(true)
        .connect_timeout(CONNECT)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE))
}

/// A job's description, however long.
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

async fn dial<Dialling>(
    address: &str,
    start: Instant,
    end: Instant,
    connect: impl Fn() -> Dialling,
) -> Result<Channel>
where
    Dialling: Future<Output = std::result::Result<Channel, tonic::transport::Error>>,
{
    let (mut backoff, mut said) = (Backoff::new(), false);
    loop {
        let attempt = tokio::time::timeout_at(end.into(), connect()).await;
        let cause = match attempt {
            Ok(Ok(channel)) => return Ok(channel),
            Ok(Err(error)) => with_sources(&error),
            Err(_) => "no answer".into(),
        };
        tracing::debug!(server = address, cause, "connecting failed, trying again");
        if start.elapsed() >= LONG && !std::mem::replace(&mut said, true) {
            let left = end.saturating_duration_since(Instant::now()).as_secs_f64();
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

/// tonic's own message is "transport error"; the reason is in its sources.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked_before_dialling() {
        for good in
            ["localhost:7070", "http://10.0.0.1:7070", "[::1]:7070", "unix:/run/l.sock", "unix:///run/l.sock"]
        {
            assert!(endpoint(good).is_ok(), "{good}");
        }
        for bad in ["", "localhost", "https://host:1", "http://", "a b:1", "unix:", "unix:l.sock"] {
            assert_eq!(endpoint(bad).unwrap_err().field, "options.servers", "{bad}");
        }
    }
}
