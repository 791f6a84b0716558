//! Tasks of a running server: its listeners, and background tasks for links, certificates and connections.

use std::sync::Arc;

use futures_util::{FutureExt, future::OptionFuture};
use longshore_wire::{
    memfd::Listener,
    v1::{admin_server::AdminServer, tensors_server::TensorsServer, training_server::TrainingServer},
};
use tokio::{sync::watch, task::JoinHandle};
use tonic::transport::Error;
use tonic_health::server::HealthReporter;

use super::{error::ServerError, listening::Listening, routes::router, shown};
use crate::{
    accept,
    config::Config,
    connections::Connections,
    descriptors, http,
    members::Members,
    memfd,
    neighbours::Loopback,
    requests::Metered,
    service::Services,
    trust::{Guard, Handshakes, Readers, Register, Trust},
};

pub(super) struct Serving {
    pub(super) services: Services,
    pub(super) register: Option<Arc<Register>>,
    pub(super) linking: Option<Listener>,
    /// File descriptors that this process may have open.
    pub(super) descriptors: usize,
}

impl Serving {
    /// Serves until `stopped` is true. The returned reporter controls the health service.
    pub(super) async fn start(
        self,
        config: &Config,
        listening: Listening,
        stopped: &watch::Receiver<bool>,
    ) -> Result<(JoinHandle<Result<(), Error>>, HealthReporter), ServerError> {
        let Serving { services, register, linking, descriptors } = self;
        let (bounds, jobs) = (Arc::clone(&services.bounds), Arc::clone(&services.jobs));
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<TrainingServer<Services>>().await;
        health.set_serving::<TensorsServer<Services>>().await;
        health.set_serving::<AdminServer<Services>>().await;
        let most = descriptors::for_connections(descriptors);
        let connections = Connections::new(&bounds, config.max_connections, most, Arc::clone(&jobs));
        let routes = |transport: &'static str, trust: &Trust| {
            let services = Services { transport, ..services.clone() };
            let health = Guard::new(Metered::new(health_service.clone()), trust);
            Ok::<_, ServerError>(router(services, trust)?.add_service(health))
        };
        let stopping = stop_of(stopped);
        let listen = http::Listen { address: shown(listening.address(), config), tls: register.is_some() };
        let tcp = match (listening.tcp, &register) {
            (None, _) => None,
            (Some((tcp, _)), Some(register)) => {
                let handshakes = Handshakes::new(tcp, Arc::clone(register), most);
                let incoming = accept::incoming(handshakes, Arc::clone(&connections));
                let routes = routes("tls", &Trust::Listed(Arc::clone(register)))?;
                Some(routes.serve_with_incoming_shutdown(incoming, stopping).boxed())
            }
            (Some((tcp, _)), None) if config.insecure => {
                let incoming = accept::incoming(tcp, Arc::clone(&connections));
                Some(routes("tcp", &Trust::Anybody)?.serve_with_incoming_shutdown(incoming, stopping).boxed())
            }
            (Some((tcp, _)), None) => {
                let incoming = accept::incoming(Loopback::new(tcp), Arc::clone(&connections));
                let trust = Trust::Neighbours(Members::of(None).map_err(ServerError::UnixGroup)?);
                Some(routes("tcp", &trust)?.serve_with_incoming_shutdown(incoming, stopping).boxed())
            }
        };
        let tcp = OptionFuture::from(tcp).map(Option::transpose);
        let readers = register.as_ref().filter(|_| config.http_tls).map(|of| Readers::new(Arc::clone(of)));
        let expiring = Arc::clone(&connections).watch(register.clone());
        let unix = match listening.unix.map(|socket| accept::incoming(socket, connections)) {
            Some(incoming) => {
                let routes = routes("unix", &Trust::User)?;
                Some(routes.serve_with_incoming_shutdown(incoming, stop_of(stopped)))
            }
            None => None,
        };
        let unix = OptionFuture::from(unix).map(Option::transpose);
        let watched = register.is_some();
        let watching = register.map(|register| register.watch()).transpose().map_err(ServerError::Signals)?;
        let linked = linking.is_some();
        let linking = linking.map(|listener| memfd::serve(listener, Arc::clone(&services.links), jobs));
        let names = config.http_host.clone();
        let page = listening.page.map(|(listener, _)| async move {
            http::serve(listener, services, listen, readers, &names).await
        });
        let serving = tokio::spawn(async move {
            // Calls refer to links, so both end together.
            let both = async { tokio::try_join!(tcp, unix).map(|_| ()) };
            tokio::select! {
                served = both => served,
                _ = OptionFuture::from(linking), if linked => Ok(()),
                Some(never) = OptionFuture::from(page) => match never {},
                never = expiring => match never {},
                _ = OptionFuture::from(watching), if watched => Ok(()),
            }
        });
        Ok((serving, health))
    }
}

/// Resolves when serving must stop.
fn stop_of(stopped: &watch::Receiver<bool>) -> impl Future<Output = ()> + use<> {
    let mut stopped = stopped.clone();
    async move {
        let _ = stopped.wait_for(|stop| *stop).await;
    }
}
