"""One job's life on several servers, with two ranks in this process. Each version is compared with NumPy's."""

import math
from concurrent.futures import ThreadPoolExecutor

import grpc
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
    """The call must be refused with this reason, for this field; the refusal."""
    try:
        call()
    except (Refused, ChunkRefused) as refusal:
        assert (refusal.reason, refusal.field) == (reason, field), refusal
        return refusal
    raise AssertionError(f"the call must be refused as {reason} of {field}")


def job_on(protocol, addresses, name: str, dtype: str, tier: str) -> Job:
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
    """What a model's backward pass would give: it depends on the weights that were read, and on the batch."""
    for micro_step in range(MICRO_STEPS):
        random = np.random.default_rng([batch, rank, step, micro_step])
        noise = job.layout.flat(lambda elements: random.standard_normal(elements, np.float32))
        yield rounded((noise + np.float32(0.5) * reads.weights) * np.float32(reads.loss_scale), job.dtype)


class Scenario:
    """The acts, in the order in which they are played. Each leaves the job at a version that was compared."""

    def __init__(self, protocol, addresses, dtype: str, tier: str):
        self.messages = protocol.messages
        self.job, self.tier = job_on(protocol, addresses, f"stock-{dtype}", dtype, tier), tier
        self.servers = self.job.connect()
        self.lead, self.other = Lead(self.job), Rank(self.job, 1)
        self.withdrawn_by = None  # an incarnation whose decision on the newest version does not stand
        random = np.random.default_rng(12)
        weights = self.job.layout.flat(lambda elements: random.standard_normal(elements, np.float32))
        self.reference = Reference(self.job.layout, GROUPS, dtype, weights)

    def play(self):
        self.start()
        self.errors()
        self.exact_and_delayed()
        self.overflow()
        self.lead_dies()
        self.pauses()
        self.withdrawn()
        self.checkpoint()
        self.lead.leave()
        self.other.leave()
        refused(self.other.join, "FENCED", "incarnation")

    # What the acts are made of.

    def contribute(self, step: int, reads: int, change=lambda rank, gradients: None):
        """Both ranks pull a version, compute and push at once; the sum of their gradients."""

        def work(rank):
            pulled = rank.pull(reads)
            assert_same_bits(pulled.weights, self.reference.images[reads], f"rank {rank.number}'s version {reads}")
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
        """Decides the step and compares the version that it makes. The other rank learns it."""
        decision = self.decide(step, reads, gradient, **more)
        assert not any(answer.duplicate for answer in self.lead.commit(decision))
        kind, commit = self.other.learn()
        if more.get("pause_reason"):
            assert (kind, commit.reason) == ("paused", more["pause_reason"])
            kind, commit = self.other.learn()
        assert kind == "commit" and commit == decision.commit, commit
        self.reference.step(decision.commit, gradient)
        self.compare(self.lead.incarnation)
        for rank in (self.lead, self.other):
            rank.forget()
        return decision

    def compare(self, decided_by: int):
        """The servers' version against the reference: the image, who decided it, and every bit of the state."""
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

    # The acts.

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

    def errors(self):
        """Refusals say why, and change nothing."""
        pulled = self.lead.pull(0)
        gradients = list(gradients_of(self.job, 0, 1, pulled, batch=0))
        [first, *_] = self.lead.requests(self.servers[0], 1, pulled, gradients)
        first.crc32 ^= 1
        [result] = self.servers[0].push([first])
        assert (result.refusal.kind, result.refusal.field) == ("CORRUPT", "push.crc32"), result
        [*_, last] = self.lead.requests(self.servers[0], 1, pulled, [np.ones_like(gradients[0])])
        assert self.job.layout.owners[-1] == 0, "the last shard's end is padding"
        [result] = self.servers[0].push([last])
        assert (result.refusal.kind, result.refusal.field) == ("INVALID", "payload"), result
        commit = self.messages.Commit(
            step=1,
            gradient_scale=LOSS_SCALE * 2 * MICRO_STEPS,
            clip_coefficient=1,
            groups=[self.messages.Hyper(**hyper) for hyper in HYPERS],
            loss_scale=LOSS_SCALE,
        )
        decision = Decision(commit, [0] * len(self.servers))
        refusal = refused(lambda: self.lead.commit(decision), "PRECONDITION", "commit.step")
        assert refusal.code == grpc.StatusCode.FAILED_PRECONDITION, refusal.code
        assert "shard 0 from rank 0" in refusal.fault["limit"], refusal.fault
        commit.groups[0].lr = math.nan
        refusal = refused(lambda: self.lead.commit(decision), "INVALID", "commit.groups[0].lr")
        assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT and refusal.fault["value"] == "NaN", refusal.fault

    def exact_and_delayed(self):
        """Step 2 is computed and pushed before step 1 is decided."""
        first = self.contribute(1, reads=0)
        assert all(result.duplicate for result in self.lead.push_again(1)), "pushed again, acknowledged again"
        second = self.contribute(2, reads=0)
        decision = self.finish(1, 0, first)
        assert all(answer.duplicate for answer in self.lead.send(decision)), "the same decision again"
        other = self.messages.Commit()
        other.CopyFrom(decision.commit)
        other.groups[0].lr *= 2
        refused(lambda: self.lead.send(Decision(other, decision.origins)), "CONFLICT", "commit.groups")
        assert all(result.decided for result in self.other.push_again(1)), "not needed any more"
        self.finish(2, 0, second, compensation=0.3)

    def overflow(self):
        """One rank's inf: the step is skipped and the loss scale halved. The version is the one before."""

        def overflows(rank, gradients):
            if rank is self.other:
                gradients[1][3 * BLOCK + 5] = np.inf

        gradient = self.contribute(3, reads=2, change=overflows)
        decision = self.finish(3, 2, gradient)
        assert decision.commit.skip and self.other.loss_scales[3] == LOSS_SCALE / 2
        assert self.reference.applied == 2

    def lead_dies(self):
        """Rank 0 dies when one server has its decision. The next one completes it, and the first can do no more."""
        gradient = self.contribute(4, reads=3)
        decision = self.decide(4, 3, gradient)
        self.lead.commit(decision, self.servers[:1])
        old, self.lead = self.lead, Lead(self.job)
        versions = [answer.progress.version for answer in self.lead.everywhere("Describe")]
        assert versions == [4] + [3] * (len(self.servers) - 1), versions
        assert {progress.version for progress in self.lead.take_over()} == {4}
        refused(lambda: old.send(decision), "FENCED", "incarnation")
        refused(lambda: old.push_again(4), "FENCED", "incarnation")
        refused(old.join, "FENCED", "incarnation")
        back = dict(incarnation=old.incarnation, reason="I am back")
        refused(lambda: old.everywhere("Pause", **back), "FENCED", "incarnation")
        self.reference.step(decision.commit, gradient)
        self.compare(decided_by=old.incarnation)
        assert self.other.learn() == ("commit", decision.commit)
        self.withdrawn_by = old.incarnation

    def pauses(self):
        """A decision pauses the job, and a resume reaches a part of the servers. Then a pause without a decision."""
        gradient = self.contribute(5, reads=4)
        self.finish(5, 4, gradient, pause_reason="look at the loss")
        refused(lambda: self.other.push(6, self.other.pull(5), [gradient]), "PRECONDITION", "job.phase")
        for server in self.servers[:2]:
            self.lead.call(server, "Resume", version=5, loss_scale=LOSS_SCALE)
        self.lead.complete_resume()
        kind, resumed = self.other.learn()
        assert (kind, resumed.loss_scale) == ("resumed", LOSS_SCALE)
        assert self.lead.loss_scales[5] == self.other.loss_scales[5] == LOSS_SCALE
        self.lead.everywhere("Pause", incarnation=self.lead.incarnation, reason="a walk")
        kind, paused = self.other.learn()
        assert (kind, paused.reason) == ("paused", "a walk")
        refused(lambda: self.lead.everywhere("Resume", version=5, loss_scale=1), "PRECONDITION", "loss_scale")
        for _ in range(2):
            self.lead.everywhere("Resume", version=5)
        assert self.other.learn()[0] == "resumed"

    def withdrawn(self):
        """A contribution computed with a decision that does not stand is refused: its rank starts over."""
        if self.tier == "nvme":
            self.take_back()
        else:
            gradient = self.contribute(6, reads=5)
            self.finish(6, 5, gradient)
        reads = self.other.pull(6)
        reads.decided_by = self.withdrawn_by
        gradients = list(gradients_of(self.job, 1, 7, reads, batch=0))
        refused(lambda: self.other.push(7, reads, gradients), "CONFLICT", "push.reads")
        self.other = Rank(self.job, 1)
        self.other.join()
        self.other.watch(self.servers[0])

    def take_back(self):
        """Only the first server has all of step 6, and decides it, as after a crash of the others. It is taken back."""
        pulled = self.lead.pull(5)

        def push_first(rank):
            gradients = list(gradients_of(self.job, rank.number, 6, pulled, batch=1))
            rank.push(6, pulled, gradients, rank.servers[:1])

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(push_first, [self.lead, self.other]))
        answers = list(self.servers[0].stream("Stats", job=self.job.name, step=6))
        commit = self.messages.Commit(
            step=6,
            gradient_scale=pulled.loss_scale * 2 * MICRO_STEPS,
            clip_coefficient=0.5,
            groups=[self.messages.Hyper(**hyper) for hyper in HYPERS],
            loss_scale=pulled.loss_scale,
            decided_by=self.lead.incarnation,
        )
        origins = [sum(answer.origin for answer in answers) % 2**64]
        self.lead.commit(Decision(commit, origins), self.servers[:1])
        assert self.other.learn() == ("commit", commit)
        weights = np.zeros(self.job.layout.elements, np.float32)
        assert set(self.other.pull_from(self.servers[0], 6, weights)) == {self.lead.incarnation}
        self.withdrawn_by = self.lead.incarnation
        self.lead = Lead(self.job)
        assert {progress.version for progress in self.lead.take_over()} == {5}
        refused(self.other.learn, "UNAVAILABLE", "job")
        self.other.version = 5
        self.other.watch(self.servers[0])
        gradient = self.contribute(6, reads=5)
        self.finish(6, 5, gradient)

    def checkpoint(self):
        """A checkpoint of a version to come, while training goes on. The job is deleted and restored from it."""
        name = "seven"
        with ThreadPoolExecutor(len(self.servers)) as threads:
            written = [
                threads.submit(self.lead.call, server, "Checkpoint", name=name, version=7) for server in self.servers
            ]
            gradient = self.contribute(7, reads=6)
            ahead = self.messages.LookAhead(lr=[0.002, 0.0])
            self.finish(7, 6, gradient, look_ahead=ahead, trainer_state=b"data from batch 7 on")
            parts = [answer.result().part for answer in written]
        for sealed in self.lead.everywhere("SealCheckpoint", name=name, parts=parts):
            assert sealed.parts == len(self.servers)
        for listed in self.lead.everywhere("ListCheckpoints"):
            [checkpoint] = listed.checkpoints
            assert (checkpoint.name, checkpoint.version, checkpoint.damage) == (name, 7, "")
            assert checkpoint.state_hash == self.reference.state_hash()
        self.export()
        saved, decided_by = self.reference.saved(), self.lead.incarnation
        self.finish(8, 7, self.contribute(8, reads=7))

        self.lead.everywhere("DeleteJob")
        self.lead, self.other = Lead(self.job), Rank(self.job, 1)
        self.lead.open()
        held = self.lead.everywhere("Restore", name=name, mode=self.messages.RESTORE_MODE_HOLD)
        assert len({answer.id for answer in held}) == 1, "all servers read the same contents"
        assert all(answer.progress.phase == self.messages.PHASE_LOADING for answer in held)
        self.lead.everywhere("Restore", name=name, mode=self.messages.RESTORE_MODE_WHOLE)
        for progress in self.lead.take_over():
            assert (progress.phase, progress.version) == (self.messages.PHASE_TRAINING, 7)
            assert progress.last_commit.trainer_state == b"data from batch 7 on"
        self.other.join()
        self.other.watch(self.servers[0])
        self.reference.restore(saved)
        self.compare(decided_by)
        self.finish(8, 7, self.contribute(8, reads=7))

    def export(self):
        """The weights themselves, in fp32."""
        weights = np.full(self.job.layout.elements, np.nan, np.float32)
        for server in self.servers:
            *slices, end = server.stream("Export", job=self.job.name, dtype=self.messages.DTYPE_F32)
            assert end.end and end.version == self.reference.version
            for answer in slices:
                start = answer.shard * SHARD_ELEMENTS + answer.offset
                values = np.frombuffer(answer.payload, "<f4")
                weights[start : start + len(values)] = values
        assert_same_bits(weights, self.reference.weights, "the export")
