//! Shared by the engine's integration tests: random numbers from a seed, jobs split over servers, and independent
//! references.

pub(crate) mod cluster;
pub(crate) mod low;
pub(crate) mod reference;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use longshore_engine::tier::Storage;
use longshore_proto::{
    Commit, Correction, Dtype, Hyper, JobName, JobSpec, Lifetime, Param, Step, TierKind,
    limits::BLOCK_ELEMENTS,
};

pub(crate) const BLOCK: usize = BLOCK_ELEMENTS as usize;

/// Returns the number of random cases: `PROPTEST_CASES` where it is set, otherwise `quick`.
pub(crate) fn cases(quick: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(quick)
}

/// Random numbers by SplitMix64. All numbers of a test follow from one seed, which proptest prints and shrinks.
#[derive(Clone)]
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub(crate) fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    /// Returns a number in [-1, 1) with 24 bits.
    pub(crate) fn unit(&mut self) -> f32 {
        ((self.next() >> 40) as i32 - (1 << 23)) as f32 / (1 << 23) as f32
    }

    /// Returns a number in [low, high).
    pub(crate) fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Returns a job whose parameter i has `sizes[i]` elements and belongs to group `groups[i]`.
pub(crate) fn spec(sizes: &[u64], groups: &[u32]) -> JobSpec {
    let count = groups.iter().max().map_or(1, |&group| group + 1);
    let params = sizes.iter().zip(groups).enumerate().map(|(index, (&size, &group))| Param {
        name: format!("layer.{index}"),
        shape: vec![size],
        group,
    });
    JobSpec {
        groups: (0..count).map(|group| format!("group {group}")).collect(),
        shard_elements: BLOCK_ELEMENTS,
        ..JobSpec::new(JobName::parse("name", "test").unwrap(), params.collect())
    }
}

/// Returns a decision to apply a step. Its gradient scale is right for a loss scale of 1.
pub(crate) fn commit(spec: &JobSpec, step: u64) -> Commit {
    Commit {
        step: Step(step),
        skip: false,
        gradient_scale: spec.contributions(spec.world_size) as f64,
        clip_coefficient: 1.0,
        correction: Correction::None,
        left_out: Vec::new(),
        groups: vec![Hyper { weight_decay: 0.01, ..Hyper::default() }; spec.groups.len()],
        norm: 0.0,
        loss_scale: 1.0,
        trainer_state: Vec::new(),
        decided_by: Default::default(),
        pause_reason: String::new(),
        placement: None,
    }
}

/// Encodes values for the wire, rounded to nearest.
pub(crate) fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
    let narrow = |bits: fn(f32) -> u16| {
        let narrow: Vec<u16> = values.iter().map(|&x| bits(x)).collect();
        bytemuck::cast_slice(&narrow).to_vec()
    };
    match dtype {
        Dtype::F32 => bytemuck::cast_slice(values).to_vec(),
        Dtype::F16 => narrow(|x| half::f16::from_f32(x).to_bits()),
        Dtype::Bf16 => narrow(|x| half::bf16::from_f32(x).to_bits()),
    }
}

pub(crate) fn decode(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let widen = |value: fn(u16) -> f32| {
        let halves = bytes.as_chunks().0.iter();
        halves.map(|&half| value(u16::from_le_bytes(half))).collect()
    };
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|&four| f32::from_le_bytes(four)).collect(),
        Dtype::F16 => widen(|bits| half::f16::from_bits(bits).to_f32()),
        Dtype::Bf16 => widen(|bits| half::bf16::from_bits(bits).to_f32()),
    }
}

/// Returns a gradient of the whole flat space as workers send it, with zeros in gaps and padding.
pub(crate) fn gradient(spec: &JobSpec, seed: u64, scale: f32) -> Vec<u8> {
    let mut noise = Noise(seed);
    let mut values = vec![0.0; reference::flat_elements(spec)];
    for range in reference::param_ranges(spec) {
        values[range].fill_with(|| noise.unit() * scale);
    }
    encode(&values, spec.gradient_dtype)
}

/// Returns initial weights of the whole flat space.
pub(crate) fn weights(spec: &JobSpec, seed: u64) -> Vec<f32> {
    let mut noise = Noise(seed);
    let mut values = vec![0.0; reference::flat_elements(spec)];
    for range in reference::param_ranges(spec) {
        values[range].fill_with(|| noise.unit());
    }
    values
}

/// State directories, and a folder on a tmpfs. Drop removes all of them.
pub(crate) struct Dirs {
    _roots: Vec<tempfile::TempDir>,
    pub(crate) storage: Storage,
}

impl Dirs {
    pub(crate) fn new(count: usize) -> Dirs {
        let mut roots: Vec<_> = (0..count).map(|_| tempfile::tempdir().unwrap()).collect();
        let dirs: Vec<PathBuf> = roots.iter().map(|root| root.path().join("state")).collect();
        dirs.iter().for_each(|dir| fs::create_dir(dir).unwrap());
        roots.push(tempfile::tempdir_in("/dev/shm").unwrap());
        let shm_dir = Some(roots[count].path().to_path_buf());
        Dirs { _roots: roots, storage: Storage { dirs, shm_dir, buffers: 2, ..Storage::default() } }
    }

    /// Returns a job's folder in a state directory.
    pub(crate) fn folder(&self, index: usize) -> PathBuf {
        self.storage.dirs[index].join("test/server-0-of-1")
    }

    /// Returns the first directory in which a tier keeps its jobs.
    pub(crate) fn of(&self, tier: TierKind) -> &Path {
        match tier.properties().lifetime {
            Lifetime::Host => self.storage.shm_dir.as_deref().unwrap(),
            _ => &self.storage.dirs[0],
        }
    }
}

/// Returns the tiers whose state survives the server's process.
pub(crate) fn lasting_tiers() -> impl Iterator<Item = TierKind> {
    TierKind::ALL.into_iter().filter(|tier| tier.properties().survives_restart())
}

/// Starts this test binary with the ignored test `child`, whose folder is in the environment variable `variable`. Waits
/// for the file `ready` there, then kills the process with SIGKILL after the time `after`.
pub(crate) fn run_and_kill(child: &str, variable: &str, dir: &Path, after: Duration) {
    let ready = dir.join("ready");
    let _ = fs::remove_file(&ready);
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--ignored", "--exact", child, "--nocapture"]).env(variable, dir).stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !ready.exists() {
        let waits = Instant::now() < deadline && child.try_wait().unwrap().is_none();
        assert!(waits, "the child was never ready");
        thread::sleep(Duration::from_micros(200));
    }
    thread::sleep(after);
    child.kill().unwrap();
    child.wait().unwrap();
}
