//! A job that waits for the decision on its first step, as after a worker's death between gradient and
//! decision.

use longshore_proto::{Hyper, JobName, JobSpec, Param, Rank, limits::BLOCK_ELEMENTS};
use longshore_worker::{LossScaler, Options, Pipeline, PipelineOptions, Session};

/// Opens a job of one rank and one parameter on a server, and sends all gradients of its first step.
///
/// # Panics If the server refuses.
pub fn undecided(address: &str, job: &str) -> Pipeline {
    let weight = Param { name: "weight".into(), shape: vec![1000], group: 0 };
    let spec = JobSpec {
        shard_elements: BLOCK_ELEMENTS,
        ..JobSpec::new(JobName::parse("name", job).unwrap(), vec![weight])
    };
    let mut session = Session::connect(Options::new(vec![address.to_string()], spec, Rank(0))).unwrap();
    let joined = session.start(&|_| vec![0.5; 1000]).unwrap();
    let options = PipelineOptions::new(LossScaler::fixed(1.0).unwrap(), |_| vec![Hyper::default()]);
    let mut pipeline = Pipeline::new(session, &joined, options).unwrap();
    pipeline.begin().unwrap();
    let mut assembler = pipeline.assembler(0).unwrap();
    assembler.put(0, &[0.5; 1000]).unwrap();
    assembler.finish().unwrap();
    pipeline
}
