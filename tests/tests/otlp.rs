//! `--otlp`: a step is one trace, from rank 0's process through its commit to the updates of every server.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use longshore_tests::{
    command::{longshore, longshored},
    conformance::cluster::eventually,
    server::ServerOptions,
    train::Train,
};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::any_value::Value,
    trace::v1::Span,
};
use tokio::{net::TcpListener, runtime::Runtime};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport::Server};

/// Spans with the name of the program that made them.
type Spans = Arc<Mutex<Vec<(String, Span)>>>;

struct Collector(Spans);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for resource in request.into_inner().resource_spans {
            let attributes = resource.resource.iter().flat_map(|resource| &resource.attributes);
            let service = attributes.filter(|pair| pair.key == "service.name").find_map(|pair| {
                match pair.value.as_ref()?.value.as_ref()? {
                    Value::StringValue(name) => Some(name.clone()),
                    _ => None,
                }
            });
            let service = service.expect("a service's name");
            let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            kept.extend(spans.map(|span| (service.clone(), span)));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A collector on a free port of this host, and what it has been sent.
fn collector(runtime: &Runtime) -> (String, Spans) {
    let spans = Spans::default();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let service = TraceServiceServer::new(Collector(Arc::clone(&spans)));
    let serving = Server::builder().add_service(service);
    runtime.spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));
    (address, spans)
}

#[test]
fn a_step_is_one_trace_of_its_worker_and_its_servers() {
    const STEPS: usize = 4;
    let runtime = Runtime::new().unwrap();
    let (address, spans) = collector(&runtime);
    let mut servers = [0, 1].map(|_| ServerOptions::new().args(["--otlp", &address]).start());
    let names = servers.each_ref().map(|server| server.address().to_string());
    Train::new(STEPS as u64).servers(&names).args(["--otlp", &address]).run();
    for server in &mut servers {
        // What was not sent yet is sent when a server ends.
        server.process.terminate();
        assert_eq!(server.process.code(), 0);
    }
    let traces = eventually("spans of every step", || {
        let spans = spans.lock().unwrap_or_else(PoisonError::into_inner);
        let mut traces: BTreeMap<Vec<u8>, Vec<(String, Span)>> = BTreeMap::new();
        for (service, span) in spans.iter() {
            traces.entry(span.trace_id.clone()).or_default().push((service.clone(), span.clone()));
        }
        (traces.len() >= STEPS).then_some(traces)
    });
    assert_eq!(traces.len(), STEPS, "a trace for each step and no other: {traces:?}");
    for trace in traces.values() {
        let of = |service: &str, name: &str| {
            let found = trace.iter().filter(|(by, span)| by == service && span.name == name);
            found.map(|(_, span)| span).collect::<Vec<_>>()
        };
        let [step] = of("longshore", "step")[..] else { panic!("one step: {trace:?}") };
        assert!(step.parent_span_id.is_empty(), "{step:?}");
        for stage in ["begin", "finish"] {
            let [stage] = of("longshore", stage)[..] else { panic!("one {stage}: {trace:?}") };
            assert_eq!(stage.parent_span_id, step.span_id);
        }
        let performed = of("longshored", "perform");
        assert!(performed.len() >= servers.len(), "{performed:?}");
        assert!(performed.iter().all(|span| span.parent_span_id == step.span_id), "{performed:?}");
        let updates = of("longshored", "update");
        assert!(updates.len() >= servers.len(), "{updates:?}");
        let within = |update: &&Span| performed.iter().any(|span| span.span_id == update.parent_span_id);
        assert!(updates.iter().all(within), "{updates:?}");
    }
}

#[test]
fn what_is_no_collector_is_refused_and_one_that_is_away_holds_nothing_up() {
    for wrong in ["host:4317", "https://host:4317", "not an address"] {
        let refused = longshored(["--otlp", wrong]);
        assert_eq!(refused.code, 2, "{refused:?}");
        assert!(
            refused.stderr.contains("--otlp is") && refused.stderr.contains("http://host:4317"),
            "{refused:?}"
        );
        let refused = longshore(["train", "--steps", "1", "--otlp", wrong]);
        assert_eq!(refused.code, 1, "{refused:?}");
    }
    // Nobody listens on this port once the listener is gone.
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    Train::new(3).args(["--otlp", &format!("http://{gone}")]).run();
}
