//! Bad requests get a typed error that names the fault, and the job ends with the bits of a run without the
//! request.

mod checkpoints;
mod data;
mod opening;
mod ranks;
mod trainer;

use std::sync::OnceLock;

use longshore_proto::{Incarnation, JobSpec, Layout};
use longshore_tests::conformance::{
    cluster::Cluster,
    raw::{At, Raw, chunk},
    reference::{self, Trace},
    run::{self, Rank, assert_trace},
    scenario::Scenario,
    synthetic::Synthetic,
};
use longshore_wire::v1;
use longshore_worker::Pipeline;

pub(crate) const STEPS: u64 = 4;
/// Number of steps before the bad input.
pub(crate) const BEFORE: u64 = 2;

pub(crate) fn plan() -> Scenario {
    Scenario { clip: Some(1.0), ..Scenario::exact(STEPS) }
}

/// Returns the trace of the same job without disturbance.
pub(crate) fn undisturbed() -> &'static Trace {
    static TRACE: OnceLock<Trace> = OnceLock::new();
    TRACE.get_or_init(|| reference::train(&Synthetic::default(), &plan()))
}

/// A job between its second and third step. Tests send it bad input.
pub(crate) struct Victim<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) spec: JobSpec,
    pub(crate) layout: Layout,
    pub(crate) incarnation: Incarnation,
    pub(crate) servers: Vec<Raw>,
    pub(crate) pipeline: Pipeline,
    pub(crate) seen: Rank,
}

impl<'a> Victim<'a> {
    pub(crate) fn start(cluster: &'a Cluster, job: &str) -> Victim<'a> {
        let (model, plan) = (Synthetic::default(), plan());
        let spec = plan.spec(job, &model);
        let mut pipeline = run::enter(cluster.options(&spec, 0), &model, &plan);
        let mut seen = Rank::default();
        run::steps(&mut pipeline, &model, &plan, BEFORE, &mut seen).expect("steps");
        let servers: Vec<Raw> = (0..cluster.addresses().len()).map(|server| cluster.raw(server)).collect();
        let incarnation = Incarnation(servers[0].describe(job).ranks[0].incarnation);
        Victim {
            cluster,
            layout: spec.validate().expect("a spec"),
            spec,
            incarnation,
            servers,
            pipeline,
            seen,
        }
    }

    pub(crate) fn job(&self) -> &str {
        self.spec.name.as_str()
    }

    /// Returns a valid chunk of the next step, of a shard that the first server owns.
    pub(crate) fn chunk(&self) -> v1::PushRequest {
        let at = At { step: BEFORE + 1, rank: 0, incarnation: self.incarnation };
        chunk(&self.spec, &self.layout, 0, at)
    }

    /// Trains on to the end, and checks every bit.
    #[track_caller]
    pub(crate) fn finish(self) {
        let Victim { cluster, spec, pipeline, seen, .. } = self;
        finish(cluster, spec.name.as_str(), pipeline, seen);
    }
}

#[track_caller]
pub(crate) fn finish(cluster: &Cluster, job: &str, mut pipeline: Pipeline, mut seen: Rank) {
    let (model, plan) = (Synthetic::default(), plan());
    run::steps(&mut pipeline, &model, &plan, STEPS, &mut seen).expect("the job goes on");
    let seen = run::finish(pipeline, &plan, seen);
    let trace = run::collect(cluster, &model, &plan, job, vec![seen]);
    assert_trace(&trace, undisturbed(), &model, &plan, job);
}
