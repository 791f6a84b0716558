//! Promise 6: bad input gets a typed error that names field, value, limit and remedy, and changes nothing.

mod commits;
mod left_out;
mod opening;
mod pulls;
mod pushes;
mod uploads;

use longshore_proto::{Fault, FaultKind, JobSpec};

use crate::common::{
    self, BLOCK,
    cluster::Cluster,
    commit, gradient,
    reference::{self, Reference},
    spec, weights,
};

/// The fault's kind, its field, and substrings of its message.
type Expected = (FaultKind, &'static str, &'static [&'static str]);

#[track_caller]
fn check(fault: &Fault, (kind, field, words): Expected) {
    assert_eq!((fault.kind, fault.field.as_str()), (kind, field), "{fault}");
    let message = fault.to_string();
    for word in words {
        assert!(message.contains(word), "no {word:?} in: {message}");
    }
    for part in [&fault.value, &fault.limit, &fault.remedy] {
        assert!(!part.is_empty() && message.contains(part.as_str()), "{fault:?}");
    }
}

/// A job of two ranks and two micro-steps over two servers. Its shards have 5, 5 and 2 blocks. Their fp32 gradients
/// have 2, 2 and 1 chunks.
fn small() -> JobSpec {
    let mut spec = spec(&[7, 11 * BLOCK as u64], &[0, 1]);
    spec.shard_elements = 5 * BLOCK as u64;
    spec.gradient_dtype = longshore_proto::Dtype::F32;
    (spec.world_size, spec.micro_steps) = (2, 2);
    spec
}

/// A job in the middle of step 2. Rank 1's last micro-step has only its first chunk, and everything before is complete.
struct Midway {
    cluster: Cluster,
    first: Vec<Vec<u8>>,
    second: Vec<Vec<u8>>,
}

impl Midway {
    fn new() -> Midway {
        let spec = small();
        let step =
            |seed: u64| (0..4).map(|index| gradient(&spec, seed * 10 + index, 1.0)).collect::<Vec<_>>();
        let (first, second) = (step(1), step(2));
        let mut cluster = Cluster::started(&spec, 2, &weights(&spec, 1));
        cluster.step(&first, &commit(&spec, 1));
        cluster.push(2, &second[..3]);
        let (chunk, payload) = cluster.chunks(2, 1, 1, &second[3])[0];
        cluster.store(&chunk, payload).unwrap();
        Midway { cluster, first, second }
    }

    /// Finishes the step. The right bits then show that refused requests left no trace.
    fn finish(mut self) {
        let spec = self.cluster.spec.clone();
        self.cluster.step(&self.second, &commit(&spec, 2));
        let mut reference = Reference::new(&spec, &weights(&spec, 1));
        reference.step(&self.first, &commit(&spec, 1));
        reference.step(&self.second, &commit(&spec, 2));
        assert_eq!(self.cluster.hash(), reference.hash());
    }

    /// Returns the visible state of every server.
    fn view(&self) -> String {
        let jobs = self.cluster.jobs.iter();
        let view = |job: &std::sync::Arc<longshore_engine::job::Job>| {
            format!(
                "{:?} {:?} {:?} {:?}",
                job.progress(),
                job.protocol.ranks(),
                job.protocol.waiting_for(),
                job.traffic()
            )
        };
        jobs.map(view).collect::<Vec<_>>().join("\n")
    }
}

fn encode_f32(values: &[f32]) -> Vec<u8> {
    common::encode(values, longshore_proto::Dtype::F32)
}
