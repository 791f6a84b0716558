//! Promise 1: weights and state depend only on the job, its first weights and the gradients. Random jobs are split and
//! driven in random ways, and compared with a plain loop.

use std::{collections::BTreeMap, env};

use longshore_engine::{
    io::Engine,
    kernels::Isa,
    step::Admission,
    tier::{Spill, Storage},
};
use longshore_proto::{
    Commit, ContributionChunk, Correction, Dtype, Formats, Hyper, JobSpec, LeftOut, MasterFormat, Partition,
    Rank, Rule, ShardId, Slice, StateFormat, Step, TierKind, Version,
};
use proptest::prelude::*;

use crate::common::{
    BLOCK, Noise, cases,
    cluster::{Cluster, compute},
    encode,
    reference::{Reference, block_squares, flat_elements, param_ranges, sum},
    spec, weights,
};

/// The expected results of a whole run.
struct Run {
    spec: JobSpec,
    initial: Vec<f32>,
    /// Gradients of each step, ordered by micro-step and then by rank.
    gradients: Vec<Vec<Vec<u8>>>,
    commits: Vec<Commit>,
    squares: Vec<Vec<f64>>,
    /// The image of each version, from version 0.
    images: Vec<Vec<u8>>,
    end: Reference,
    /// True for a job on one server, in shards of the smallest size.
    many_shards: bool,
}

fn random_spec(noise: &mut Noise, rule: Rule, delay: u32, formats: (StateFormat, MasterFormat)) -> JobSpec {
    let params = 1 + noise.below(6);
    let groups = 1 + noise.below(3);
    let large = noise.one_in(6);
    let size = |noise: &mut Noise| match noise.below(3) {
        0 => 1 + noise.below(200),
        1 => 1 + noise.below(BLOCK),
        _ => BLOCK / 2 + noise.below(if large { 5 * BLOCK } else { BLOCK }),
    };
    let sizes: Vec<u64> = (0..params).map(|_| size(noise) as u64).collect();
    let mut of: Vec<u32> = (0..params).map(|_| noise.below(groups) as u32).collect();
    of[0] = groups as u32 - 1; // so that every group index below it exists
    let mut spec = spec(&sizes, &of);
    spec.rule = rule;
    spec.gradient_dtype = noise.pick(&[Dtype::Bf16, Dtype::F16, Dtype::F32]);
    spec.image_dtype = noise.pick(&[Dtype::Bf16, Dtype::F16, Dtype::F32]);
    spec.world_size = 1 + noise.below(3) as u32;
    spec.micro_steps = 1 + noise.below(if large { 2 } else { 4 }) as u32;
    spec.max_delay = delay;
    spec.formats = Formats { state: formats.0, master: formats.1, seed: noise.next() };
    if noise.one_in(2) {
        spec.partitions = random_partitions(noise, params, spec.world_size);
    }
    spec.leave_out = spec.formats.state != StateFormat::Block8 && noise.one_in(2);
    spec
}

/// Returns random partitions. Each has some ranks as contributors, or is frozen. A rank contributes to one partition.
fn random_partitions(noise: &mut Noise, params: usize, world_size: u32) -> Vec<Partition> {
    let firsts: Vec<usize> = (0..params).filter(|&first| first == 0 || noise.one_in(2)).collect();
    let partition = |first: usize| {
        if noise.one_in(3) {
            return Partition::frozen(first as u32);
        }
        let always = noise.below(world_size as usize) as u32;
        let ranks = (0..world_size).filter(|&rank| rank == always || noise.one_in(2)).map(Rank).collect();
        Partition { first: first as u32, ranks }
    };
    let mut partitions: Vec<Partition> = firsts.into_iter().map(partition).collect();
    let idle = |rank: &Rank| partitions.iter().all(|partition| !partition.ranks.contains(rank));
    let idle: Vec<Rank> = (0..world_size).map(Rank).filter(idle).collect();
    let trained = partitions.iter().position(|partition| !partition.is_frozen()).unwrap_or(0);
    partitions[trained].ranks.extend(idle);
    partitions[trained].ranks.sort();
    partitions
}

fn random_hyper(noise: &mut Noise) -> Hyper {
    Hyper {
        lr: noise.between(0.0, 0.1),
        beta1: noise.pick(&[0.9, 0.0, 0.5, 0.95]),
        beta2: noise.pick(&[0.999, 0.95, 0.0]),
        eps: noise.pick(&[1e-8, 1e-6, 0.0]),
        weight_decay: noise.pick(&[0.0, 0.1, 0.01]),
        momentum: noise.pick(&[0.0, 0.9, 1.0]),
        dampening: noise.pick(&[0.0, 0.5]),
        nesterov: noise.one_in(2),
        lr_decay: noise.pick(&[0.0, 0.01]),
        momentum_decay: noise.pick(&[0.0, 0.004]),
    }
}

/// Takes the gradients of `params` away: all their elements become -0.
fn leave_out(spec: &JobSpec, contribution: &mut [u8], params: &[usize]) {
    let width = spec.gradient_dtype.bytes() as usize;
    let nothing = encode(&[-0.0], spec.gradient_dtype);
    for range in param_ranges(spec).iter().filter(|_| spec.leave_out) {
        let first = &mut contribution[range.start * width..(range.start + 1) * width];
        if first == nothing {
            // The first element of an existing gradient must not be -0, since that means no gradient.
            first.fill(0);
        }
    }
    for &param in params {
        let range = &param_ranges(spec)[param];
        let nothing = encode(&vec![-0.0; range.len()], spec.gradient_dtype);
        contribution[range.start * width..range.end * width].copy_from_slice(&nothing);
    }
}

/// Returns one contribution. `bad` puts an infinity or a NaN into it.
fn contribution(noise: &mut Noise, spec: &JobSpec, bad: bool) -> Vec<u8> {
    let mut values = vec![0.0; flat_elements(spec)];
    let size = noise.pick(&[1.0, 1e-3, 100.0]);
    for range in param_ranges(spec) {
        for value in &mut values[range] {
            // Zeros, and magnitudes down to f16's denormals, let a wrong order of a sum show.
            let magnitude = noise.pick(&[size, size, size / 64.0, size * 1e-4, 0.0]);
            *value = noise.unit() * magnitude;
        }
    }
    if bad {
        let at = param_ranges(spec)[noise.below(spec.params.len())].start;
        values[at] = noise.pick(&[f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
    }
    encode(&values, spec.gradient_dtype)
}

impl Run {
    fn random(seed: u64, rule: Rule, delay: u32, formats: (StateFormat, MasterFormat), steps: u64) -> Run {
        let mut noise = Noise(seed);
        let spec = random_spec(&mut noise, rule, delay, formats);
        Run::of(spec, noise, steps, false)
    }

    /// Returns a run of 30 shards. The memory tier updates one to four of them at once.
    fn many_shards(seed: u64, delay: u32, formats: (StateFormat, MasterFormat), steps: u64) -> Run {
        let mut noise = Noise(seed);
        let sizes: Vec<u64> = (0..10).map(|_| (3 * BLOCK - noise.below(1000)) as u64).collect();
        let mut spec = spec(&sizes, &[0, 1, 0, 1, 1, 0, 0, 1, 0, 1]);
        spec.world_size = 1 + noise.below(2) as u32;
        spec.max_delay = delay;
        spec.formats = Formats { state: formats.0, master: formats.1, seed: noise.next() };
        if noise.one_in(2) {
            spec.partitions = random_partitions(&mut noise, 10, spec.world_size);
        }
        spec.leave_out = spec.formats.state != StateFormat::Block8 && noise.one_in(2);
        Run::of(spec, noise, steps, true)
    }

    fn of(spec: JobSpec, mut noise: Noise, steps: u64, many_shards: bool) -> Run {
        let initial = weights(&spec, noise.next());
        let mut end = Reference::new(&spec, &initial);
        let (mut gradients, mut commits, mut squares) = (Vec::new(), Vec::new(), Vec::new());
        let mut images = vec![end.image.clone()];
        let clips = noise.one_in(2);
        for step in 1..=steps {
            let bad = noise.one_in(5).then(|| noise.below(spec.contributions(spec.world_size) as usize));
            let mut of_step: Vec<_> = (0..spec.contributions(spec.world_size) as usize)
                .map(|index| contribution(&mut noise, &spec, bad == Some(index)))
                .collect();
            // Some parameters get no gradient from any rank. Others get none from some ranks.
            let params = if spec.leave_out { spec.params.len() } else { 0 };
            let without: Vec<usize> = (0..params).filter(|_| noise.one_in(3)).collect();
            for contribution in &mut of_step {
                let more: Vec<usize> = (0..params).filter(|_| noise.one_in(4)).collect();
                leave_out(&spec, contribution, &[&without[..], &more[..]].concat());
            }
            let sum = sum(&spec, &of_step);
            let (without, of_blocks) = (nobodys(&spec, &sum), block_squares(&sum));
            let loss_scale = scale_of(&spec, &commits, step);
            let mut commit = decide(&mut noise, &spec, commits.last(), loss_scale, &of_blocks, clips);
            commit.left_out = count(commits.last(), &without, commit.skip);
            assert_eq!(commit.step.0, step);
            end.step(&of_step, &commit);
            images.push(end.image.clone());
            gradients.push(of_step);
            commits.push(commit);
            squares.push(of_blocks);
        }
        Run { spec, initial, gradients, commits, squares, images, end, many_shards }
    }
}

/// Returns the parameters that no rank has a gradient for, in ascending order.
fn nobodys(spec: &JobSpec, sum: &[f32]) -> Vec<u32> {
    let nothing = |range: &std::ops::Range<usize>| sum[range.clone()].iter().all(|x| x.to_bits() == 1 << 31);
    let ranges = param_ranges(spec);
    (0..).zip(&ranges).filter(|(_, range)| spec.leave_out && nothing(range)).map(|(param, _)| param).collect()
}

/// Returns the list of missed steps for the next commit, from the commit before.
fn count(before: Option<&Commit>, without: &[u32], skip: bool) -> Vec<LeftOut> {
    let mut counts: BTreeMap<u32, (u64, bool)> = before
        .iter()
        .flat_map(|before| &before.left_out)
        .map(|left_out| (left_out.param, (left_out.steps, skip && left_out.now)))
        .collect();
    for &param in without.iter().filter(|_| !skip) {
        let (steps, now) = counts.entry(param).or_default();
        (*steps, *now) = (*steps + 1, true);
    }
    counts.into_iter().map(|(param, (steps, now))| LeftOut { param, steps, now }).collect()
}

/// Returns the loss scale of a step's gradients. A gradient has the scale that was decided with the version it read.
fn scale_of(spec: &JobSpec, commits: &[Commit], step: u64) -> f64 {
    let reads = step.saturating_sub(1 + u64::from(spec.max_delay));
    reads.checked_sub(1).map_or(3.0, |index| commits[index as usize].loss_scale)
}

/// Decides a step as rank 0 does. Some steps are skipped although nothing overflowed.
fn decide(
    noise: &mut Noise,
    spec: &JobSpec,
    before: Option<&Commit>,
    loss_scale: f64,
    squares: &[f64],
    clips: bool,
) -> Commit {
    let gradient_scale = loss_scale * spec.contributions(spec.world_size) as f64;
    let norm = squares.iter().sum::<f64>().sqrt() / gradient_scale;
    let clip_coefficient = if clips && norm.is_finite() { (0.7 / (norm + 1e-6)).min(1.0) } else { 1.0 };
    let rates: Vec<f64> = spec.groups.iter().map(|_| noise.between(0.0, 0.01)).collect();
    let correction = match noise.below(3) {
        0 | 1 if spec.max_delay > 0 && spec.rule.can_look_ahead() => Correction::LookAhead(rates),
        _ => Correction::None,
    };
    let step = before.map_or(1, |before| before.step.0 + 1);
    Commit {
        step: Step(step),
        skip: !norm.is_finite() || noise.one_in(8),
        gradient_scale,
        clip_coefficient,
        correction,
        left_out: Vec::new(),
        groups: spec.groups.iter().map(|_| random_hyper(noise)).collect(),
        norm,
        loss_scale: noise.pick(&[1.0, 1024.0, 3.0]),
        trainer_state: vec![step as u8],
        decided_by: Default::default(),
        pause_reason: String::new(),
        placement: None,
    }
}

/// Chunks on their way to the servers. Workers may be as many steps ahead as the job has room for.
struct Traffic<'a> {
    run: &'a Run,
    cluster: Cluster,
    noise: Noise,
    pushed_to: u64,
    pending: Vec<(ContributionChunk, &'a [u8])>,
    stored: Vec<(ContributionChunk, &'a [u8])>,
    decided: u64,
    reopened: bool,
    restarted: bool,
}

impl<'a> Traffic<'a> {
    fn new(run: &'a Run, seed: u64, isa: Isa) -> Traffic<'a> {
        Traffic::on(run, seed, isa, TierKind::Memory, &Storage::default())
    }

    fn on(run: &'a Run, seed: u64, isa: Isa, tier: TierKind, storage: &Storage) -> Traffic<'a> {
        let mut noise = Noise(seed);
        let (shard_blocks, servers) =
            if run.many_shards { (1, 1) } else { (noise.pick(&[1, 2, 3, 5, 9]), 1 + noise.below(3)) };
        let spec = JobSpec { shard_elements: (shard_blocks * BLOCK) as u64, tier, ..run.spec.clone() };
        let servers = servers.min(spec.validate().unwrap().shards() as usize);
        let compute = compute(1 + noise.below(2), isa);
        let mut cluster = Cluster::try_open(&spec, servers, &compute, storage).unwrap();
        (0..spec.world_size).for_each(|rank| cluster.join(rank));
        cluster.upload(&run.initial);
        let (pending, stored) = (Vec::new(), Vec::new());
        let (reopened, restarted) = (false, false);
        Traffic { run, cluster, noise, pushed_to: 0, pending, stored, decided: 0, reopened, restarted }
    }

    fn go(&mut self) {
        let steps = self.run.commits.len() as u64;
        let mut turns = 0;
        while self.decided < steps {
            turns += 1;
            assert!(turns < 1_000_000, "stuck: {:?}", self.cluster.jobs[0].protocol.waiting_for());
            self.turn(steps);
        }
        self.cluster.work();
    }

    fn turn(&mut self, steps: u64) {
        let ahead = u64::from(self.run.spec.max_delay) + 1;
        if self.pushed_to < (self.decided + ahead).min(steps) {
            self.produce();
        }
        match self.noise.below(12) {
            0..6 => self.send(),
            6 => self.resend(),
            7..10 => {
                let server = self.noise.below(self.cluster.jobs.len());
                self.cluster.work_once(server);
            }
            10 => self.pull(),
            _ => self.decide(),
        }
    }

    /// Replaces the servers, which were killed at any point. Workers send the undecided steps again.
    fn restart(mut self, storage: &Storage) -> Traffic<'a> {
        let (spec, servers) = (self.cluster.spec.clone(), self.cluster.jobs.len());
        drop(std::mem::take(&mut self.cluster.jobs));
        let mut cluster = Cluster::try_open(&spec, servers, &compute(2, Isa::detect()), storage).unwrap();
        (0..spec.world_size).for_each(|rank| cluster.join(rank));
        for job in &cluster.jobs {
            assert_eq!(job.progress().version.0, self.decided);
        }
        self.pending.clear();
        self.stored.clear();
        Traffic { cluster, pushed_to: self.decided, restarted: true, ..self }
    }

    /// Replaces the servers, which were killed after their version was durable. The new ones continue from the stored
    /// state.
    fn reopen(mut self, storage: &Storage) -> Traffic<'a> {
        self.cluster.settle().unwrap();
        let (spec, servers) = (self.cluster.spec.clone(), self.cluster.jobs.len());
        drop(std::mem::take(&mut self.cluster.jobs));
        let cluster = Cluster::try_open(&spec, servers, &compute(2, Isa::detect()), storage).unwrap();
        for job in &cluster.jobs {
            let progress = job.progress();
            // The texts are compared, because the NaN norm of an overflowed step does not equal itself.
            assert_eq!(format!("{:?}", progress.last_commit), format!("{:?}", self.run.commits.last()));
            assert_eq!((progress.version.0, progress.applied), (self.decided, self.run.end.applied));
            assert_eq!(job.protocol.durable().0, self.decided);
        }
        Traffic { cluster, reopened: true, ..self }
    }

    fn produce(&mut self) {
        self.pushed_to += 1;
        let run = self.run;
        for (index, flat) in run.gradients[self.pushed_to as usize - 1].iter().enumerate() {
            let index = index as u32;
            let (micro_step, rank) = (index / run.spec.world_size, index % run.spec.world_size);
            // A shard's gradient comes in chunks, or as one lent chunk in the worker's memory.
            let cut = if self.noise.one_in(3) { Cluster::lent } else { Cluster::chunks };
            let loss_scale = scale_of(&run.spec, &run.commits, self.pushed_to);
            let chunks = cut(&self.cluster, self.pushed_to, micro_step, rank, flat).into_iter();
            self.pending
                .extend(chunks.map(|(chunk, part)| (ContributionChunk { loss_scale, ..chunk }, part)));
        }
    }

    fn send(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let index = self.noise.below(self.pending.len());
        let (chunk, payload) = self.pending[index];
        match self.cluster.store(&chunk, payload) {
            Ok(Admission::New(_)) => self.stored.push(self.pending.swap_remove(index)),
            Ok(Admission::Busy) => {}
            // Sums that were made before the restart are kept.
            Ok(Admission::Superseded) if self.restarted => self.stored.push(self.pending.swap_remove(index)),
            // The chunk's step was decided before the restart.
            Ok(Admission::Decided) if self.restarted => self.stored.push(self.pending.swap_remove(index)),
            // The same chunk of the previous micro-step has not come yet.
            Err(fault) if fault.field == "micro_step" => {}
            other => panic!("{chunk:?} was never stored: {other:?}"),
        }
    }

    fn resend(&mut self) {
        if !self.stored.is_empty() {
            let (chunk, payload) = self.stored[self.noise.below(self.stored.len())];
            let expected = match chunk.contribution.step.0 <= self.decided {
                true => Admission::Decided,
                false if chunk.lent || self.restarted => Admission::Superseded,
                false => Admission::Duplicate,
            };
            let found = self.cluster.store(&chunk, payload).unwrap();
            assert!(
                found == expected || (self.restarted && found == Admission::Duplicate),
                "{chunk:?}: {found:?}"
            );
        }
    }

    /// Pulls one of the two newest versions, which may not be made yet. All bytes of an answer must be right.
    fn pull(&mut self) {
        let version = self.decided.saturating_sub(self.noise.below(2) as u64);
        let shard = ShardId(self.noise.below(self.cluster.layout.shards() as usize) as u32);
        if let Some(image) = self.cluster.image(shard, version).unwrap() {
            self.check_image(shard, version, &image);
        }
        self.check_pull(shard, version);
    }

    /// Pulls a part of a shard and checks its bytes. Returns false if the version is not there.
    fn check_pull(&self, shard: ShardId, version: u64) -> bool {
        let (job, run) = (&self.cluster.jobs[self.cluster.owner(shard)], self.run);
        let elements = self.cluster.layout.shard_len(shard);
        let slice = Slice { shard, offset: 100, elements: elements - 150 };
        let Some(pulled) = job.copy_image(&slice, Version(version)).unwrap() else { return false };
        let size = run.spec.image_dtype.bytes() as usize;
        let inner = 100 * size..(elements as usize - 50) * size;
        let expected = &self.cluster.part(&run.images[version as usize], shard, size)[inner];
        assert!(pulled.bytes == expected, "{shard} at version {version}");
        true
    }

    fn check_image(&self, shard: ShardId, version: u64, image: &[u8]) {
        let size = self.run.spec.image_dtype.bytes() as usize;
        let expected = self.cluster.part(&self.run.images[version as usize], shard, size);
        let differs = image.iter().zip(expected).position(|(ours, theirs)| ours != theirs);
        assert_eq!(differs, None, "first differing byte of the image of {shard} at version {version}");
    }

    fn decide(&mut self) {
        let Some(squares) = self.cluster.squares(self.decided + 1) else { return };
        let bits = |squares: &[f64]| squares.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let expected: Vec<f64> = self.run.squares[self.decided as usize]
            .iter()
            .map(|&x| match x {
                x if x.is_nan() => f64::NAN,
                x => x,
            })
            .collect();
        assert_eq!(bits(&squares), bits(&expected));
        let commit = &self.run.commits[self.decided as usize];
        if !commit.skip {
            let now = commit.left_out.iter().filter(|left_out| left_out.now).map(|left_out| left_out.param);
            assert_eq!(self.cluster.left_out(self.decided + 1), now.collect::<Vec<_>>());
        }
        let duplicates = self.cluster.commit(&self.run.commits[self.decided as usize]).unwrap();
        assert!(duplicates.iter().all(|duplicate| !duplicate));
        self.decided += 1;
    }

    fn check(&self) {
        let end = &self.run.end;
        assert_eq!(self.cluster.hash(), end.hash());
        // After a crash, an exact job has no older image, since no step reads that any more.
        let older = u64::from(!(self.reopened && self.run.spec.max_delay == 0));
        for shard in (0..self.cluster.layout.shards()).map(ShardId) {
            for version in self.decided - older..=self.decided {
                let image = self.cluster.image(shard, version).unwrap().expect("settled");
                self.check_image(shard, version, &image);
                assert!(self.check_pull(shard, version));
            }
        }
    }
}

/// Half of the cases have fp32 state.
fn formats() -> impl Strategy<Value = (StateFormat, MasterFormat)> {
    use {MasterFormat as M, StateFormat as S};
    prop_oneof![
        5 => Just((S::F32, M::F32)),
        1 => Just((S::Bf16, M::F32)),
        1 => Just((S::Block8, M::F32)),
        1 => Just((S::F32, M::Bf16)),
        1 => Just((S::Bf16, M::Bf16)),
        1 => Just((S::Block8, M::Bf16)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4, max_shrink_iters: 0, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn shards_updated_together_have_the_reference_bits(seed in any::<u64>(), delay in 0u32..2, formats in formats()) {
        let run = Run::many_shards(seed, delay, formats, 4);
        let mut traffic = Traffic::new(&run, seed, Isa::detect());
        prop_assert_eq!(traffic.cluster.layout.shards(), 30, "cut small");
        traffic.go();
        traffic.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(40), max_shrink_iters: 20, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_split_and_order_gives_the_reference_bits(
        seed in any::<u64>(),
        rule in prop::sample::select(Rule::ALL.to_vec()),
        delay in 0u32..2,
        formats in formats(),
        steps in 2u64..6,
    ) {
        let run = Run::random(seed, rule, delay, formats, steps);
        for (index, isa) in Isa::available().into_iter().enumerate() {
            let mut traffic = Traffic::new(&run, seed ^ index as u64, isa);
            traffic.go();
            traffic.check();
        }
    }

    /// A server is killed at any point of its work, with updates of decided steps not made yet. The next process
    /// continues from the tmpfs.
    #[test]
    fn restarts_give_the_reference_bits(
        seed in any::<u64>(),
        rule in prop::sample::select(Rule::ALL.to_vec()),
        delay in 0u32..2,
        formats in formats(),
        steps in 2u64..6,
    ) {
        let run = Run::random(seed, rule, delay, formats, steps);
        let root = tempfile::tempdir_in("/dev/shm").unwrap();
        let storage = Storage { shm_dir: Some(root.path().into()), ..Storage::default() };
        let mut traffic = Traffic::on(&run, seed, Isa::detect(), TierKind::Shm, &storage);
        while traffic.decided < steps {
            // The turns suffice for a step only now and then, so that undecided steps must be sent again.
            let turns = traffic.noise.below(800);
            (0..turns).for_each(|_| traffic.turn(steps));
            traffic = traffic.restart(&storage);
        }
        traffic.cluster.work();
        traffic.check();
    }

    /// Every way to store the state on drives gives the reference bits, also after the death of all servers.
    #[test]
    fn disks_give_the_reference_bits(
        seed in any::<u64>(),
        rule in prop::sample::select(Rule::ALL.to_vec()),
        delay in 0u32..2,
        formats in formats(),
        steps in 2u64..5,
        directories in prop::sample::select(vec![1usize, 3]),
        resident_tenths in prop::sample::select(vec![0u64, 5, 10]),
        engine in prop::sample::select(vec![Engine::Auto, Engine::Threads]),
        buffers in 1usize..5,
        spill in prop::sample::select(vec![Spill::State, Spill::All]),
    ) {
        let run = Run::random(seed, rule, delay, formats, steps);
        // A flush takes 4 ms on a real drive, so three of four cases use a tmpfs.
        let of = if seed.is_multiple_of(4) { env::temp_dir() } else { "/dev/shm".into() };
        let roots: Vec<_> = (0..directories).map(|_| tempfile::tempdir_in(&of).unwrap()).collect();
        let state_bytes = flat_elements(&run.spec) as u64 * 12;
        let storage = Storage {
            dirs: roots.iter().map(|root| root.path().to_path_buf()).collect(),
            engine,
            resident_bytes: state_bytes * resident_tenths / 10,
            buffers,
            spill,
            ..Storage::default()
        };
        let mut traffic = Traffic::on(&run, seed, Isa::detect(), TierKind::Nvme, &storage);
        traffic.go();
        traffic.check();
        traffic.reopen(&storage).check();
    }
}
