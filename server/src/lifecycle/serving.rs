//! Tasks of a running server: its listeners with their services, and background tasks for links, certificates and
//! connections.

use std::{sync::Arc, time::Duration};

use futures_util::{
    FutureExt,
    future::{BoxFuture, OptionFuture},
};
use longshore_proto::limits::{
    MAX_CONNECTION_CALLS, MAX_CONTROL_MESSAGE_BYTES, MAX_HEADER_LIST_BYTES, WINDOW_BYTES,
};
use longshore_wire::{
    self as wire,
    memfd::Listener,
    v1::{admin_server::AdminServer, tensors_server::TensorsServer, training_server::TrainingServer},
};
use tokio::{sync::watch, task::JoinHandle};
use tonic::{service::Routes, transport::Error};
use tonic_health::server::HealthReporter;

use super::{
    ServerError,
    prepared::{Listening, for_connections},
    shown,
};
use crate::{
    accept::{self, Accept},
    config::Config,
    connections::Connections,
    http,
    members::Members,
    memfd,
    neighbours::Loopback,
    service::{DataPlane, Services},
    trust::{Guard, Handshakes, Readers, Register, Trust},
};

/// Largest HTTP/2 DATA frame, which holds a chunk. At 1 MiB a push takes the least CPU time of both ends: 0.38 s/GB
/// on loopback TCP. At 64 KiB it takes 0.52. At the default of 16 KiB a payload costs 64 writes and as many reads.
const FRAME_BYTES: u32 = 1024 * 1024;
/// Interval of pings to a silent peer. A dead peer is detected after one to two intervals.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// Number of refused calls after which a peer's connection is closed. Calls beyond the limit, or against the protocol,
/// are refused.
const MAX_REFUSED_CALLS: usize = 1024;

pub(super) struct Serving {
    pub(super) services: Services,
    pub(super) register: Option<Arc<Register>>,
    pub(super) linking: Option<Listener>,
    /// File descriptors that this process may have open.
    pub(super) descriptors: usize,
}

impl Serving {
    /// Serves until `stopped` is true.
    pub(super) async fn start(
        self,
        config: &Config,
        listening: Listening,
        stopped: &watch::Receiver<bool>,
    ) -> Result<Served, ServerError> {
        let Serving { services, register, linking, descriptors } = self;
        let (bounds, jobs) = (Arc::clone(&services.bounds), Arc::clone(&services.jobs));
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<TrainingServer<Services>>().await;
        health.set_serving::<TensorsServer<Services>>().await;
        health.set_serving::<AdminServer<Services>>().await;
        let most = for_connections(descriptors);
        let connections = Connections::new(&bounds, config.max_connections, most, Arc::clone(&jobs));
        let routes = |transport: &'static str, trust: &Trust| {
            let services = Services { transport, ..services.clone() };
            let health = Guard::new(health_service.clone(), trust);
            Ok::<_, ServerError>(of_listener(services, trust)?.add_service(health))
        };
        let listen = http::Listen { address: shown(listening.address(), config), tls: register.is_some() };
        let tcp = match (listening.tcp, &register) {
            (None, _) => None,
            (Some((tcp, _)), Some(register)) => {
                let handshakes = Handshakes::new(tcp, Arc::clone(register), most);
                let routes = routes("tls", &Trust::Listed(Arc::clone(register)))?;
                Some(serve(handshakes, &connections, stopped, routes))
            }
            (Some((tcp, _)), None) if config.insecure => {
                Some(serve(tcp, &connections, stopped, routes("tcp", &Trust::Anybody)?))
            }
            (Some((tcp, _)), None) => {
                let trust = Trust::Neighbours(Members::of(None).map_err(ServerError::UnixGroup)?);
                Some(serve(Loopback::new(tcp), &connections, stopped, routes("tcp", &trust)?))
            }
        };
        let tcp = OptionFuture::from(tcp).map(Option::transpose);
        let readers = register.as_ref().filter(|_| config.http_tls).map(|of| Readers::new(Arc::clone(of)));
        let users = routes("unix", &Trust::User)?;
        let unix = listening.unix.map(|socket| serve(socket, &connections, stopped, users.clone()));
        let unix = OptionFuture::from(unix).map(Option::transpose);
        let expiring = connections.watch(register.clone());
        let watched = register.is_some();
        let watching = register.map(|register| register.watch()).transpose().map_err(ServerError::Signals)?;
        let linked = linking.is_some();
        let linking = linking.map(|listener| memfd::serve(listener, Arc::clone(&services.links), jobs));
        let names = config.http_host.clone();
        let page = listening.page.map(|(listener, _)| async move {
            http::serve(listener, services, listen, readers, &names).await
        });
        let serving = tokio::spawn(async move {
            // Calls refer to links, so the tasks of calls and of links end together.
            let both = async { tokio::try_join!(tcp, unix).map(|_| ()) };
            tokio::select! {
                served = both => served,
                _ = OptionFuture::from(linking), if linked => Ok(()),
                Some(never) = OptionFuture::from(page) => match never {},
                never = expiring => match never {},
                _ = OptionFuture::from(watching), if watched => Ok(()),
            }
        });
        Ok(Served { task: serving, health, users })
    }
}

/// A server that serves.
pub(super) struct Served {
    pub(super) task: JoinHandle<Result<(), Error>>,
    /// Controls the health service.
    pub(super) health: HealthReporter,
    /// The services as this server's own user calls them.
    pub(super) users: Routes,
}

/// Serves the calls of one listener until `stopped` is true.
fn serve<L: Accept + 'static>(
    listener: L,
    connections: &Arc<Connections>,
    stopped: &watch::Receiver<bool>,
    routes: Routes,
) -> BoxFuture<'static, Result<(), Error>> {
    let incoming = accept::incoming(listener, Arc::clone(connections));
    let mut stopped = stopped.clone();
    let stop = async move {
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    http2().add_routes(routes).serve_with_incoming_shutdown(incoming, stop).boxed()
}

/// Returns the services of one listener.
fn of_listener(services: Services, trust: &Trust) -> Result<Routes, ServerError> {
    let descriptors = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(wire::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let failed = |error: tonic_reflection::server::Error| ServerError::Serve(error.to_string());
    let reflection = descriptors().build_v1().map_err(failed)?;
    // Python's client uses the older reflection service.
    let older_reflection = descriptors().build_v1alpha().map_err(failed)?;
    let training = TrainingServer::new(services.clone())
        .max_decoding_message_size(MAX_CONTROL_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_CONTROL_MESSAGE_BYTES);
    let admin = AdminServer::new(services.clone()).max_decoding_message_size(MAX_CONTROL_MESSAGE_BYTES);
    Ok(Routes::new(Guard::new(training, trust))
        .add_service(Guard::new(DataPlane::new(services), trust))
        .add_service(Guard::new(admin, trust))
        .add_service(Guard::new(reflection, trust))
        .add_service(Guard::new(older_reflection, trust)))
}

/// Returns the HTTP/2 settings of a listener.
fn http2() -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .max_frame_size(Some(FRAME_BYTES))
        .initial_stream_window_size(Some(WINDOW_BYTES as u32))
        .initial_connection_window_size(Some(WINDOW_BYTES as u32))
        .max_concurrent_streams(Some(MAX_CONNECTION_CALLS))
        .http2_max_header_list_size(Some(MAX_HEADER_LIST_BYTES))
        .http2_max_local_error_reset_streams(Some(MAX_REFUSED_CALLS))
        .http2_keepalive_interval(Some(KEEPALIVE))
}
