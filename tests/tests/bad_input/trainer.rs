//! The trainer refuses text that is missing or too short, and a device that is too small.

use std::{fs, path::Path, time::Duration};

use longshore_cli::train::{
    self, LossScale, LossScaleMode, Settings,
    gpt::{Config, Gpt},
    text,
};
use longshore_proto::{Dtype, Hyper, JobName, Rule};
use longshore_tests::conformance::{cluster::Cluster, gpt, raw::Raw};
use longshore_wire::v1;
use longshore_worker::{DelayCorrection, DeviceChoice, Error, LossScalerOptions, Session, error::Shortage};

use super::Victim;

fn settings(cluster: &Cluster, job: &str, data: &Path) -> Settings {
    Settings {
        launched: false,
        errors_as_json: false,
        access: Default::default(),
        job: JobName::parse("job", job).expect("a name"),
        servers: cluster.addresses(),
        data: data.to_owned(),
        model: Config { context: 16, width: 32, heads: 2, layers: 2 },
        steps: 4,
        batch: 2,
        micro_steps: 2,
        accumulate_on_worker: false,
        world_size: 1,
        rank: Some(0),
        rule: Rule::AdamW,
        hyper: Hyper::default(),
        lr_warmup_steps: 2,
        lr_floor: 0.1,
        clip: Some(1.0),
        delay: 0,
        delay_warmup_steps: 0,
        correction: DelayCorrection::None,
        gradient_dtype: Dtype::Bf16,
        image_dtype: Dtype::Bf16,
        loss_scale: LossScale { mode: LossScaleMode::Fixed(1.0), options: LossScalerOptions::default() },
        seed: 3,
        shard_elements: None,
        tier: longshore_proto::TierKind::Memory,
        device: DeviceChoice::Host,
        formats: Default::default(),
        device_budget: None,
        checkpoint_dir: None,
        checkpoint_every: 0,
        embedded: false,
        step_weights: false,
        export: None,
        export_dtype: Dtype::Bf16,
        resume: None,
        eval_every: 2,
        eval_batches: 1,
        sample_bytes: 1,
        prompt: "The ".into(),
        temperature: 0.0,
        transport: Default::default(),
        deadline: Duration::from_secs(60),
        pause_deadline: Duration::from_secs(60),
        threads: None,
        state_dirs: Vec::new(),
        resident: 0,
        shm_dir: None,
        memory: None,
        json: false,
        plot: false,
    }
}

fn jobs(server: &Raw) -> Vec<String> {
    server.call(server.admin.clone().list_jobs(v1::ListJobsRequest {})).expect("a list").jobs
}

#[test]
fn text_that_cannot_be_trained_on_is_refused_before_a_job_is_opened() {
    let cluster = Cluster::start(2);
    let victim = Victim::start(&cluster, "reads-well");
    let (empty, binary, short) = (tempfile::tempdir(), tempfile::tempdir(), tempfile::tempdir());
    let [empty, binary, short] = [empty, binary, short].map(|folder| folder.expect("a temporary folder"));
    fs::write(binary.path().join("weights.bin"), [0, 159, 146, 150]).expect("a file");
    fs::write(binary.path().join("latin.txt"), b"caf\xe9").expect("a file");
    fs::write(short.path().join("short.txt"), "fn main() {}\n".repeat(9)).expect("a file");
    let missing = short.path().join("missing");
    let refused = |data: &Path| {
        let error = train::run(&settings(&cluster, "reads-badly", data)).expect_err("no such text");
        let text = format!("{error:#}");
        (error.downcast::<text::Error>().expect("an error of the text"), text)
    };
    use text::Error::{NoText, NotFound, SequenceTooLong};
    let (error, text) = refused(empty.path());
    assert!(
        matches!(error, NoText { files_seen: 0, binary: 0, .. }) && text.contains("give a folder"),
        "{text}"
    );
    let (error, text) = refused(binary.path());
    assert!(matches!(error, NoText { files_seen: 2, binary: 2, .. }) && text.contains("not UTF-8"), "{text}");
    let (error, text) = refused(&missing);
    assert!(matches!(error, NotFound { .. }) && text.contains("missing does not exist"), "{text}");
    let (error, text) = refused(short.path());
    assert!(matches!(error, SequenceTooLong { context: 16, available: 10 }), "{text}");
    assert!(text.contains("10 or less"), "{text}");
    assert_eq!(jobs(&victim.servers[0]), ["reads-well"]);
    victim.finish();
}

#[test]
fn a_delay_that_a_rule_cannot_look_ahead_of_is_refused_before_a_job_is_opened() {
    let cluster = Cluster::start(1);
    let victim = Victim::start(&cluster, "goes-on");
    let folder = gpt::text();
    let settings = settings(&cluster, "looks-ahead", folder.path());
    for rule in Rule::ALL.into_iter().filter(|rule| !rule.can_look_ahead()) {
        let delayed = Settings { rule, delay: 1, correction: DelayCorrection::LookAhead, ..settings.clone() };
        let error = train::run(&delayed).expect_err("nothing is known of the next step");
        let text = format!("{error:#}");
        assert!(text.contains("spec.rule") && text.contains("docs/delay.md"), "{text}");
        assert!(!jobs(&victim.servers[0]).contains(&"looks-ahead".to_string()));
        let plain = Settings { correction: DelayCorrection::None, job: job_of(rule), ..delayed };
        train::run(&plain).expect("a plain delay is for every rule");
    }
    victim.finish();
}

fn job_of(rule: Rule) -> JobName {
    JobName::parse("job", &format!("plain-{rule}")).expect("a job's name")
}

fn shortage(settings: &Settings, device_budget: u64) -> Shortage {
    let settings = Settings { device_budget: Some(device_budget), ..settings.clone() };
    let error = train::run(&settings).expect_err("the budget is not enough");
    match error.downcast() {
        Ok(Error::Shortage(shortage)) => shortage,
        other => panic!("not a shortage: {other:?}"),
    }
}

#[test]
fn a_device_that_is_too_small_is_refused_with_the_shortage() {
    let cluster = Cluster::start(1);
    let folder = gpt::text();
    let settings = |job: &str| settings(&cluster, job, folder.path());
    let need = shortage(&settings("never"), 1);
    assert!((need.free, need.budget) == (1, 1), "{need}");
    assert!(need.remedy.contains("raise --device-budget"), "{need}");
    let [unlimited, enough] =
        [("unlimited", None), ("enough", Some(need.asked))].map(|(job, device_budget)| {
            let settings = Settings { device_budget, ..settings(job) };
            train::run(&settings).expect("it fits");
            hash(&cluster, &settings)
        });
    assert_eq!(unlimited, enough);
    let short = shortage(&settings("too-small"), need.asked - 1);
    assert_eq!((short.asked, short.free), (need.asked, need.asked - 1));
    assert_eq!(jobs(&cluster.raw(0)), ["enough", "unlimited"]);
}

fn hash(cluster: &Cluster, settings: &Settings) -> longshore_worker::StateHash {
    let model = Gpt::new(settings.model).expect("a model");
    let session = Session::connect(cluster.options(&settings.spec(&model), 0)).expect("a connection");
    let hash = session.state_hash().expect("a hash");
    assert_eq!((hash.version.0, hash.applied), (settings.steps, settings.steps));
    hash
}
