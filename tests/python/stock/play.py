"""Base of the scenarios: two ranks in this process train a job, and each version is compared with NumPy's."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .layout import BLOCK, Layout, rounded
from .lead import Decision, Lead
from .rank import ChunkRefused, Job, Rank
from .update import Reference, assert_same_bits, state_hash, statistics, summed
from .wire import Refused

SHAPES = {"embed": [733, 1003], "bias": [33], "scale": [], "head": [487, 1003]}
GROUPS = [0, 1, 1, 0]
HYPERS = [
    dict(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1),
    dict(lr=1e-3, beta1=0.8, beta2=0.999, eps=1e-6),
]
SHARD_ELEMENTS = 5 * BLOCK  # neither all chunks nor the last shard are full
MICRO_STEPS = 2
LOSS_SCALE = 128.0
CLIP = 1.0


def refused(call, reason: str, field: str):
    """Checks that the call is refused with this reason, for this field. Returns the refusal."""
    try:
        call()
    except (Refused, ChunkRefused) as refusal:
        assert (refusal.reason, refusal.field) == (reason, field), refusal
        return refusal
    raise AssertionError(f"the call must be refused as {reason} of {field}")


def job_on(protocol, addresses, name: str, dtype: str, tier: str) -> Job:
    """Returns a job of two ranks."""
    messages = protocol.messages
    layout = Layout.of(SHAPES.values(), SHARD_ELEMENTS, len(addresses))
    wire_dtype = messages.Dtype.Value(f"DTYPE_{dtype.upper()}")
    spec = messages.JobSpec(
        name=name,
        params=[
            messages.Param(name=name, shape=shape, group=group)
            for (name, shape), group in zip(SHAPES.items(), GROUPS)
        ],
        groups=["decay", "no decay"],
        rule=messages.RULE_ADAMW,
        gradient_dtype=wire_dtype,
        image_dtype=wire_dtype,
        world_size=2,
        micro_steps=MICRO_STEPS,
        max_delay=1,
        shard_elements=SHARD_ELEMENTS,
        tier=messages.Tier.Value(f"TIER_{tier.upper()}"),
    )
    return Job(protocol, addresses, name, spec, layout, dtype, wire_dtype, LOSS_SCALE)


def gradients_of(job: Job, rank: int, step: int, reads, batch: int):
    """Returns a gradient in place of a model's backward. The gradient depends on the weights read and on the batch."""
    for micro_step in range(job.spec.micro_steps):
        random = np.random.default_rng([batch, rank, step, micro_step])
        noise = job.layout.flat(lambda elements: random.standard_normal(elements, np.float32))
        yield rounded((noise + np.float32(0.5) * reads.weights) * np.float32(reads.loss_scale), job.dtype)


class Play:
    """A job, its two ranks, and the reference for its servers."""

    def __init__(self, job: Job):
        self.messages, self.job = job.protocol.messages, job
        self.servers = job.connect()
        self.lead, self.other = Lead(job), Rank(job, 1)
        random = np.random.default_rng(12)
        weights = job.layout.flat(lambda elements: random.standard_normal(elements, np.float32))
        self.reference = Reference(job.layout, GROUPS, job.dtype, weights)

    def start(self):
        refused(self.lead.join, "NOT_FOUND", "job")
        shards = [[shard for shard, _ in self.job.layout.owned(server.number)] for server in self.servers]
        assert max(len(owned) for owned in shards) == 2, "one server has two shards"
        for owned, answer in zip(shards, self.lead.open()):
            assert answer.created and answer.progress.phase == self.messages.PHASE_LOADING
            assert list(answer.progress.missing_shards) == owned
        assert not any(answer.created for answer in self.lead.open()), "the same spec opens the same job"
        self.lead.take_over()
        self.lead.upload(self.reference.weights)
        for answer in self.lead.everywhere("Describe"):
            assert (answer.progress.phase, answer.progress.version) == (self.messages.PHASE_TRAINING, 0)
        self.other.join()
        self.other.watch(self.servers[0])
        self.compare(decided_by=0)

    def contribute(self, step: int, reads: int, change=lambda rank, gradients: None):
        """Both ranks pull a version, compute and push at once. Returns the sum of their gradients."""
        expected = self.reference.images[reads]

        def work(rank):
            pulled = rank.pull(reads)
            assert_same_bits(pulled.weights, expected, f"rank {rank.number}'s version {reads}")
            gradients = list(gradients_of(self.job, rank.number, step, pulled, batch=0))
            change(rank, gradients)
            rank.push(step, pulled, gradients)
            return gradients

        with ThreadPoolExecutor(2) as threads:
            of_ranks = list(threads.map(work, [self.lead, self.other]))
        return summed(list(zip(*of_ranks)))

    def decide(self, step: int, reads: int, gradient, **more) -> Decision:
        decision = self.lead.decide(step, self.lead.loss_scales[reads], CLIP, HYPERS, **more)
        blocks, _ = self.lead.stats(step)
        for block, (squares, broken) in zip(blocks, statistics(gradient), strict=True):
            assert (block.first_nonfinite if block.HasField("first_nonfinite") else None) == broken, block
            assert broken is not None or math.isclose(block.sum_squares, squares, rel_tol=1e-6), (block, squares)
        assert decision.commit.skip or decision.commit.clip_coefficient < 1, "clipped"
        return decision

    def finish(self, step: int, reads: int, gradient, **more):
        """Decides the step and compares its version. The other rank learns the decision."""
        decision = self.decide(step, reads, gradient, **more)
        assert not any(answer.duplicate for answer in self.lead.commit(decision))
        assert self.other.learn() == ("commit", decision.commit)
        self.reference.step(decision.commit, gradient)
        self.compare(self.lead.incarnation)
        for rank in (self.lead, self.other):
            rank.forget()
        return decision

    def compare(self, decided_by: int):
        """Compares the servers' version with the reference: the image, its decider, and every bit of the state."""
        version = self.reference.version
        pulled = self.lead.pull(version)
        assert_same_bits(pulled.weights, self.reference.images[version], f"version {version}")
        assert pulled.decided_by == decided_by
        hashes = {}
        for server in self.servers:
            described = self.messages.DescribeResponse()
            for part in server.stream("DescribeInParts", job=self.job.name, state_hash=True):
                described.MergeFrom(part)
            assert (described.hash_version, described.hash_applied) == (version, self.reference.applied)
            hashes |= {block.block: block.hash for block in described.hashes}
        found = [hashes[block] for block in sorted(hashes)]
        differ = [block for block, pair in enumerate(zip(found, self.reference.block_hashes())) if pair[0] != pair[1]]
        assert not differ, f"the state of blocks {differ} differs at version {version}"
        assert state_hash(version, described.hash_applied, found) == self.reference.state_hash()
