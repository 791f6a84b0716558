//! `--otlp`: spans of steps, sent to a collector by gRPC as OpenTelemetry has them.

use crate::log::Reader;

/// Why spans are not exported.
#[derive(Debug, thiserror::Error)]
pub enum OtlpError {
    #[error(
        "--otlp: this program was built without it: build with `cargo build --release --features otlp`, or leave --otlp out"
    )]
    NotBuilt,
    #[error(
        "--otlp is {endpoint}, but must be a collector's gRPC address, as in http://host:4317 ({cause}): correct it"
    )]
    Endpoint { endpoint: String, cause: String },
}

/// Sends what is left when it is dropped.
pub struct Export {
    #[cfg(feature = "otlp")]
    provider: opentelemetry_sdk::trace::SdkTracerProvider,
    /// The exporter's connection lives on it.
    #[cfg(feature = "otlp")]
    _runtime: tokio::runtime::Runtime,
}

/// Starts the export of this process's spans. A collector that is away, or slow, loses spans and holds nothing up.
#[cfg(not(feature = "otlp"))]
pub fn export(_: &str, _: &'static str) -> Result<(Reader, Export), OtlpError> {
    Err(OtlpError::NotBuilt)
}

/// Starts the export of this process's spans. A collector that is away, or slow, loses spans and holds nothing up.
#[cfg(feature = "otlp")]
pub fn export(endpoint: &str, service: &'static str) -> Result<(Reader, Export), OtlpError> {
    use opentelemetry::trace::TracerProvider;
    use opentelemetry_otlp::{SpanExporter, WithExportConfig};
    use opentelemetry_sdk::{Resource, trace::SdkTracerProvider};
    use tracing_subscriber::{Layer, filter::filter_fn};

    let wrong = |cause: String| OtlpError::Endpoint { endpoint: endpoint.to_string(), cause };
    let uri: http::Uri = endpoint.parse().map_err(|error: http::uri::InvalidUri| wrong(error.to_string()))?;
    if uri.scheme_str() != Some("http") {
        return Err(wrong("it has no http://".to_string()));
    }
    let runtime = crate::runtime("otlp").map_err(|error| wrong(error.to_string()))?;
    let exporter = {
        let _inside = runtime.enter();
        SpanExporter::builder().with_tonic().with_endpoint(endpoint).build()
    };
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(exporter.map_err(|error| wrong(error.to_string()))?)
        .with_resource(Resource::builder().with_service_name(service).build())
        .build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("longshore"));
    // Stages that belong to no step's span, such as each chunk's arrival, are for --trace.
    let is_of_step = |metadata: &tracing::Metadata<'_>| match metadata.target() {
        "step" => true,
        "stage" => ["begin", "finish", "update"].contains(&metadata.name()),
        _ => false,
    };
    Ok((layer.with_filter(filter_fn(is_of_step)).boxed(), Export { provider, _runtime: runtime }))
}

#[cfg(feature = "otlp")]
impl Drop for Export {
    fn drop(&mut self) {
        if let Err(error) = self.provider.shutdown() {
            tracing::warn!(%error, "the last spans were not sent");
        }
    }
}
