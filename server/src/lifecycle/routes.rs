//! The services of one listener, and its HTTP/2 settings.

use std::time::Duration;

use longshore_proto::limits::{
    MAX_CONNECTION_CALLS, MAX_CONTROL_MESSAGE_BYTES, MAX_HEADER_LIST_BYTES, WINDOW_BYTES,
};
use longshore_wire::{
    self as wire,
    v1::{admin_server::AdminServer, training_server::TrainingServer},
};

use super::error::ServerError;
use crate::{
    requests::Metered,
    service::{DataPlane, Services},
    trust::{Guard, Trust},
};

/// Largest HTTP/2 DATA frame, which holds a chunk. At 1 MiB a push takes the least CPU time of both ends: 0.38 s/GB
/// on loopback TCP. At 64 KiB it takes 0.52. At the default of 16 KiB a payload costs 64 writes and as many reads.
const FRAME_BYTES: u32 = 1024 * 1024;
/// A dead peer is detected after this interval to twice as much.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// Calls beyond the limit or against the protocol that a peer may open before its connection is closed.
const MAX_REFUSED_CALLS: usize = 1024;
pub(super) fn router(
    services: Services,
    trust: &Trust,
) -> Result<tonic::transport::server::Router, ServerError> {
    let descriptors = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(wire::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let failed = |error: tonic_reflection::server::Error| ServerError::Serve(error.to_string());
    let reflection = descriptors().build_v1().map_err(failed)?;
    // Python's client uses the older reflection service.
    let older_reflection = descriptors().build_v1alpha().map_err(failed)?;
    let mut builder = tonic::transport::Server::builder()
        .max_frame_size(Some(FRAME_BYTES))
        .initial_stream_window_size(Some(WINDOW_BYTES as u32))
        .initial_connection_window_size(Some(WINDOW_BYTES as u32))
        .max_concurrent_streams(Some(MAX_CONNECTION_CALLS))
        .http2_max_header_list_size(Some(MAX_HEADER_LIST_BYTES))
        .http2_max_local_error_reset_streams(Some(MAX_REFUSED_CALLS))
        .http2_keepalive_interval(Some(KEEPALIVE));
    let training = TrainingServer::new(services.clone())
        .max_decoding_message_size(MAX_CONTROL_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_CONTROL_MESSAGE_BYTES);
    let admin = AdminServer::new(services.clone()).max_decoding_message_size(MAX_CONTROL_MESSAGE_BYTES);
    Ok(builder
        .add_service(Guard::new(Metered::new(training), trust))
        .add_service(Guard::new(Metered::new(DataPlane::new(services)), trust))
        .add_service(Guard::new(Metered::new(admin), trust))
        .add_service(Guard::new(Metered::new(reflection), trust))
        .add_service(Guard::new(Metered::new(older_reflection), trust)))
}
