//! The Slurm script on a Slurm of one node. A first job ends by itself. A second ends early on a signal and
//! continues later. A third has failing workers. Each exit status is the workers'.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::Command,
};

use longshore_tests::{
    binaries,
    command::{Output, run},
    conformance::cluster::eventually,
    corpus,
    process::Process,
    skip,
};
use rustix::process::geteuid;
use tempfile::TempDir;

const MODEL: &str = "--layers 1 --width 128 --heads 2 --context 32 --batch 4";

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/slurm/train.sbatch")
}

#[test]
fn the_script_is_one_that_bash_takes() {
    let parsed = run("bash -n", Command::new("bash").arg("-n").arg(script()));
    assert_eq!((parsed.code, parsed.stderr.as_str()), (0, ""), "{parsed:?}");
}

/// Slurm's daemons on this host. Drop ends them.
struct Slurm {
    root: TempDir,
    _daemons: [Process; 3],
}

impl Slurm {
    /// Starts the daemons. `Err` gives the reason why this host cannot run them.
    fn start() -> Result<Slurm, String> {
        for daemon in ["munged", "slurmctld", "slurmd"] {
            if Command::new(daemon).arg("-V").output().is_err() {
                return Err(format!("there is no {daemon}: install Debian's package slurm-wlm"));
            }
        }
        if !geteuid().is_root() {
            return Err("Slurm's daemons start jobs as root alone".to_string());
        }
        let root = TempDir::new().unwrap();
        let host = run("hostname", Command::new("hostname").arg("-s")).stdout.trim().to_string();
        let ports = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port());
        let at = |name: &str| root.path().join(name).display().to_string();
        fs::write(at("key"), [7; 1024]).unwrap();
        for name in ["ctld", "slurmd", "text"] {
            fs::create_dir(at(name)).unwrap();
        }
        let conf = format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nAuthType=auth/munge\nAuthInfo=socket={munge}\n\
             StateSaveLocation={ctld}\nSlurmdSpoolDir={slurmd}\nSlurmctldPidFile={ctld}/pid\nSlurmdPidFile={slurmd}/pid\n\
             SlurmctldPort={}\nSlurmdPort={}\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\n\
             SelectType=select/cons_tres\nSchedulerType=sched/builtin\nJobAcctGatherType=jobacct_gather/none\nReturnToService=2\nSlurmdParameters=config_overrides\n\
             NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN\nPartitionName=all Nodes=ALL Default=YES State=UP\n",
            ports[0],
            ports[1],
            munge = at("munge"),
            ctld = at("ctld"),
            slurmd = at("slurmd"),
        );
        fs::write(at("slurm.conf"), conf).unwrap();
        let mut munged = Command::new("munged");
        munged.args(["--foreground", "--force"]);
        for (flag, name) in
            [("key-file", "key"), ("socket", "munge"), ("pid-file", "munge.pid"), ("seed-file", "seed")]
        {
            munged.arg(format!("--{flag}={}", at(name)));
        }
        // munge requires a key that only its owner can read.
        run("chmod", Command::new("chmod").args(["0600", &at("key")]));
        let daemon = |program: &str, flags: &[&str]| {
            let mut command = Command::new(program);
            Process::start(program, command.args(flags).args(["-f", &at("slurm.conf")]))
        };
        let _daemons = [
            Process::start("munged", &mut munged),
            daemon("slurmctld", &["-D", "-i"]),
            daemon("slurmd", &["-D"]),
        ];
        let slurm = Slurm { root, _daemons };
        corpus::write(&slurm.root.path().join("text"));
        eventually("the node to be idle", || {
            slurm.call("sinfo", &["--noheader", "--format=%T"]).stdout.contains("idle").then_some(())
        });
        Ok(slurm)
    }

    fn call(&self, program: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new(program);
        command.args(arguments).env("SLURM_CONF", self.root.path().join("slurm.conf"));
        run(program, command.current_dir(self.root.path()))
    }

    /// Submits the script. Returns the job's number.
    fn submit(&self, train: &str) -> String {
        let longshore = binaries::command("longshore");
        let folder = Path::new(longshore.get_program()).parent().unwrap();
        let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
        let export = format!(
            "--export=PATH={path},SERVER_MEMORY=1GiB,TRAIN={train},SLURM_CONF={}/slurm.conf",
            self.root.path().display()
        );
        let script = script().display().to_string();
        let submitted = self.call("sbatch", &["--parsable", "--ntasks-per-node=2", &export, &script]);
        assert_eq!(submitted.code, 0, "{submitted:?}");
        submitted.stdout.trim().to_string()
    }

    fn said(&self, job: &str) -> String {
        fs::read_to_string(self.root.path().join(format!("slurm-{job}.out"))).unwrap_or_default()
    }

    /// Waits for the job's end. Returns its exit status.
    fn ended(&self, job: &str) -> String {
        eventually("the job to end", || {
            let shown = self.call("scontrol", &["show", "job", job]).stdout;
            let field = |name: &str| Some(shown.split_once(name)?.1.split_whitespace().next()?.to_string());
            ["COMPLETED", "FAILED", "CANCELLED"]
                .contains(&field("JobState=")?.as_str())
                .then(|| field("ExitCode="))?
        })
    }
}

#[test]
fn jobs_end_with_their_workers_status_and_go_on_from_the_drains_checkpoint() {
    let slurm = match Slurm::start() {
        Ok(slurm) => slurm,
        Err(reason) => return skip::skipped(&reason),
    };
    let train = |steps: u64| {
        format!("longshore train --steps {steps} --data {}/text {MODEL}", slurm.root.path().display())
    };
    let told = slurm.submit(&train(1_000_000));
    eventually("some steps", || slurm.said(&told).contains("step-00000050").then_some(()));
    // Slurm sends the same signal before the time limit.
    let signal = slurm.call("scancel", &["--signal=TERM", "--batch", &told]);
    assert_eq!(signal.code, 0, "{signal:?}");
    let (status, said) = (slurm.ended(&told), slurm.said(&told));
    assert_eq!(status, "143:0", "{said}");
    // Workers finish their step first, and only then servers drain.
    let at = |part: &str| said.find(part).unwrap_or_else(|| panic!("no {part:?} in {said}"));
    assert!(at("stopped by SIGTERM after step") < at("drain: draining"), "{said}");
    assert!(at("drain: draining") < at("checkpoint written on drain"), "{said}");
    let step: u64 = said[at("after step ") + 11..].split(' ').next().unwrap().parse().unwrap();
    assert!(said.contains(&format!("drain-{step:08}")), "{said}");

    let again = slurm.submit(&train(step + 5));
    assert_eq!(slurm.ended(&again), "0:0", "{}", slurm.said(&again));
    let said = slurm.said(&again);
    assert!(
        said.contains(&format!("step {:>5} of {}", step + 1, step + 5))
            && said.contains(&format!("drain-{:08}", step + 5)),
        "{said}"
    );

    let failing = slurm.root.path().join("failing");
    fs::write(&failing, "#!/bin/sh\nexit 7\n").unwrap();
    run("chmod", Command::new("chmod").arg("+x").arg(&failing));
    let failing = slurm.submit(&failing.display().to_string());
    assert_eq!(slurm.ended(&failing), "7:0", "{}", slurm.said(&failing));
    assert!(slurm.said(&failing).contains("drain: draining"), "{}", slurm.said(&failing));
}
