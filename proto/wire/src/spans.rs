//! A step's trace across processes: a span's context in a call's metadata, as the W3C's `traceparent` has it.
//!
//! Without the feature `otlp` nothing is written and nothing is read.

use tonic::metadata::MetadataMap;

/// The span of another process that a call was made in, if it said so.
#[derive(Clone, Debug, Default)]
pub struct Parent(#[cfg(feature = "otlp")] Option<opentelemetry::Context>);

/// Writes the current span's context into a call's metadata, if the span is exported.
pub fn inject(metadata: &mut MetadataMap) {
    #[cfg(feature = "otlp")]
    exported::inject(metadata);
    #[cfg(not(feature = "otlp"))]
    let _ = metadata;
}

/// Reads the context of a call's span.
pub fn extract(metadata: &MetadataMap) -> Parent {
    #[cfg(feature = "otlp")]
    return exported::extract(metadata);
    #[cfg(not(feature = "otlp"))]
    {
        let _ = metadata;
        Parent::default()
    }
}

impl Parent {
    /// Makes `span`, which has no parent in this process, this one's child.
    pub fn adopt(&self, span: &tracing::Span) {
        #[cfg(feature = "otlp")]
        exported::adopt(self, span);
        #[cfg(not(feature = "otlp"))]
        let _ = span;
    }
}

#[cfg(feature = "otlp")]
mod exported {
    use opentelemetry::{
        propagation::{Extractor, Injector, TextMapPropagator},
        trace::TraceContextExt,
    };
    use opentelemetry_sdk::propagation::TraceContextPropagator;
    use tonic::metadata::{KeyRef, MetadataKey, MetadataMap};
    use tracing_opentelemetry::OpenTelemetrySpanExt;

    use super::Parent;

    struct Write<'a>(&'a mut MetadataMap);

    impl Injector for Write<'_> {
        fn set(&mut self, key: &str, value: String) {
            let key = MetadataKey::from_bytes(key.as_bytes()).ok();
            if let Some((key, value)) = key.zip(value.parse().ok()) {
                self.0.insert(key, value);
            }
        }
    }

    struct Read<'a>(&'a MetadataMap);

    impl Extractor for Read<'_> {
        fn get(&self, key: &str) -> Option<&str> {
            self.0.get(key)?.to_str().ok()
        }

        fn keys(&self) -> Vec<&str> {
            let ascii = |key| if let KeyRef::Ascii(key) = key { Some(key.as_str()) } else { None };
            self.0.keys().filter_map(ascii).collect()
        }
    }

    pub(super) fn inject(metadata: &mut MetadataMap) {
        let context = tracing::Span::current().context();
        TraceContextPropagator::new().inject_context(&context, &mut Write(metadata));
    }

    pub(super) fn extract(metadata: &MetadataMap) -> Parent {
        let context = TraceContextPropagator::new().extract(&Read(metadata));
        let is_there = context.span().span_context().is_valid();
        Parent(is_there.then_some(context))
    }

    pub(super) fn adopt(parent: &Parent, span: &tracing::Span) {
        if let Some(context) = &parent.0 {
            // A span that is not exported has no parent to set.
            let _ = span.set_parent(context.clone());
        }
    }
}
