//! The trainer refuses text that is missing or too short, and a device that is too small.

use std::{fs, path::Path};

use longshore_cli::train::{self, Settings, gpt::Gpt, text};
use longshore_proto::Rule;
use longshore_tests::conformance::{cluster::Cluster, gpt, raw::Raw};
use longshore_wire::v1;
use longshore_worker::{Error, Session, error::Shortage};

use super::Victim;

const STEPS: u64 = 4;
const FLAGS: &str = "--context 16 --width 32 --heads 2 --layers 2 --steps 4 --batch 2 --micro-steps 2 --rank 0 --lr 0.001 \
    --lr-warmup-steps 2 --warmup-steps 0 --seed 3 --device host --eval-every 2 --eval-batches 1 --sample-bytes 1 \
    --temperature 0";

/// Returns the settings of a run with these flags too.
fn settings(cluster: &Cluster, job: &str, data: &Path, more: &[&str]) -> anyhow::Result<Settings> {
    let (servers, data) = (cluster.addresses().join(","), data.to_str().expect("a path of text"));
    let given = ["--servers", &servers, "--job", job, "--data", data];
    Settings::parse(&[&given, FLAGS.split_whitespace().collect::<Vec<_>>().as_slice(), more].concat())
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
        let settings = settings(&cluster, "reads-badly", data, &[]).expect("flags");
        let error = train::run(&settings).expect_err("no such text");
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
    for rule in Rule::ALL.into_iter().filter(|rule| !rule.can_look_ahead()) {
        let rule = rule.to_string();
        let delayed = ["--optimizer", &rule, "--delay", "1"];
        let error = settings(&cluster, "looks-ahead", folder.path(), &delayed);
        let text = format!("{:#}", error.expect_err("nothing is known of the next step"));
        assert!(text.contains("spec.rule") && text.contains("docs/delay.md"), "{text}");
        assert!(!jobs(&victim.servers[0]).contains(&"looks-ahead".to_string()));
        let plain = [&delayed[..], &["--correction", "none"]].concat();
        let plain = settings(&cluster, &format!("plain-{rule}"), folder.path(), &plain).expect("flags");
        train::run(&plain).expect("a plain delay is for every rule");
    }
    victim.finish();
}

fn shortage(settings: &Settings) -> Shortage {
    let error = train::run(settings).expect_err("the budget is not enough");
    match error.downcast() {
        Ok(Error::Shortage(shortage)) => shortage,
        other => panic!("not a shortage: {other:?}"),
    }
}

#[test]
fn a_device_that_is_too_small_is_refused_with_the_shortage() {
    let cluster = Cluster::start(1);
    let folder = gpt::text();
    let settings = |job: &str, budget: Option<u64>| {
        let budget = budget.map(|budget| budget.to_string());
        let more = budget.as_ref().map(|budget| ["--device-budget", budget]);
        settings(&cluster, job, folder.path(), more.as_ref().map_or(&[], |more| &more[..])).expect("flags")
    };
    let need = shortage(&settings("never", Some(1)));
    assert!((need.free, need.budget) == (1, 1), "{need}");
    assert!(need.remedy.contains("raise --device-budget"), "{need}");
    let [unlimited, enough] =
        [("unlimited", None), ("enough", Some(need.asked))].map(|(job, device_budget)| {
            let settings = settings(job, device_budget);
            train::run(&settings).expect("it fits");
            hash(&cluster, &settings)
        });
    assert_eq!(unlimited, enough);
    let short = shortage(&settings("too-small", Some(need.asked - 1)));
    assert_eq!((short.asked, short.free), (need.asked, need.asked - 1));
    assert_eq!(jobs(&cluster.raw(0)), ["enough", "unlimited"]);
}

fn hash(cluster: &Cluster, settings: &Settings) -> longshore_worker::StateHash {
    let model = Gpt::new(settings.model).expect("a model");
    let session = Session::connect(cluster.options(&settings.spec(&model), 0)).expect("a connection");
    let hash = session.state_hash().expect("a hash");
    assert_eq!((hash.version.0, hash.applied), (STEPS, STEPS));
    hash
}
