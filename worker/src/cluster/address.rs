//! Checks a server's address and dials it, on the session's runtime. `Peer` opens its connections here. Taps of a
//! connection let its payloads bypass HTTP/2.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use http::Uri;
use hyper_util::rt::TokioIo;
use longshore_proto::Fault;
use longshore_wire::{
    Channel,
    dial::{self, CONNECTION_WINDOW_BYTES, Dialler},
    direct::{Dialled, Direct, Side, Taps},
    tls::{Credentials, DialError},
};
use tonic::transport::{Endpoint, Error};
use tower_service::Service;

use super::pace::{Pace, Paced};

/// Checked address, with the dialler of its connections.
#[derive(Clone)]
pub struct Address {
    endpoint: Endpoint,
    dialler: Dialler,
}

impl Address {
    /// Checks the forms that [`dial::endpoint`] takes.
    ///
    /// # Errors
    /// For any other form, and for a scheme that contradicts the credentials.
    pub fn new(address: &str, credentials: Option<&Credentials>) -> Result<Address, Fault> {
        let endpoint = dial::endpoint(address, credentials)?;
        Ok(Address { endpoint, dialler: Dialler::new(address, credentials) })
    }

    /// Opens a connection for calls without large payloads.
    ///
    /// # Errors
    /// If no server answers, or if one end does not trust the other.
    pub async fn connect(&self) -> Result<Channel, Error> {
        self.connect_with(Taps::default(), None).await
    }

    /// Opens a connection whose payloads can bypass HTTP/2 by `taps`.
    pub(super) async fn connect_with(&self, taps: Taps, pace: Option<&Pace>) -> Result<Channel, Error> {
        let connector = Connector { dialler: self.dialler.clone(), taps, pace: pace.cloned() };
        let channel = self.endpoint.connect_with_connector(connector).await?;
        Ok(Channel::new(channel, self.dialler.credentials().cloned()))
    }
}

type Dialling = Pin<Box<dyn Future<Output = Result<TokioIo<Direct<Paced<Dialled>>>, DialError>> + Send>>;

/// Opens the socket of a channel. tonic calls it at first, and again after each break of the connection.
#[derive(Clone)]
struct Connector {
    dialler: Dialler,
    taps: Taps,
    pace: Option<Pace>,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Direct<Paced<Dialled>>>;
    type Error = DialError;
    type Future = Dialling;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), DialError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Dialling {
        let Connector { dialler, taps, pace } = self.clone();
        Box::pin(async move {
            let socket = Paced::new(dialler.dial(&uri).await?, pace.as_ref());
            Ok(TokioIo::new(Direct::new(socket, Side::Client, CONNECTION_WINDOW_BYTES as usize, taps)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked_before_dialling() {
        for good in
            ["localhost:7070", "http://10.0.0.1:7070", "[::1]:7070", "unix:/run/l.sock", "unix:///run/l.sock"]
        {
            assert!(Address::new(good, None).is_ok(), "{good}");
        }
        for bad in
            ["", "localhost", "https://host:1", "http://", "a b:1", "unix:", "unix:l.sock", "ftp://host:1"]
        {
            let fault = Address::new(bad, None).err().expect(bad);
            assert_eq!(fault.field, "options.servers", "{bad}");
        }
    }
}
