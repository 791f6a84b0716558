"""A job's life on several servers, with two ranks in this process. Each version is compared with NumPy's."""

import math
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from .layout import BLOCK
from .lead import Decision, Lead
from .play import HYPERS, LOSS_SCALE, MICRO_STEPS, SHARD_ELEMENTS, Play, gradients_of, job_on, refused
from .rank import Rank
from .update import assert_same_bits


class Scenario(Play):
    """The acts, in order. Each leaves the job at a compared version."""

    def __init__(self, protocol, addresses, dtype: str, tier: str):
        super().__init__(job_on(protocol, addresses, f"stock-{dtype}", dtype, tier))

    def play(self):
        self.start()
        self.errors()
        self.exact_and_delayed()
        self.overflow()
        self.lead_dies()
        self.checkpoint()
        self.lead.leave()
        self.other.leave()
        refused(self.other.join, "FENCED", "incarnation")

    def errors(self):
        """Refusals name their reason, and change nothing."""
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
        self.finish(2, 0, second)

    def overflow(self):
        """A rank's inf: the step is skipped, the loss scale halves, and the version keeps its weights."""

        def overflows(rank, gradients):
            if rank is self.other:
                gradients[1][3 * BLOCK + 5] = np.inf

        gradient = self.contribute(3, reads=2, change=overflows)
        decision = self.finish(3, 2, gradient)
        assert decision.commit.skip and self.other.loss_scales[3] == LOSS_SCALE / 2
        assert self.reference.applied == 2

    def lead_dies(self):
        """Rank 0 dies after its decision reached one server. The next process completes it, and the first is fenced."""
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

    def checkpoint(self):
        """A checkpoint of a coming version, while training goes on. The job is deleted and restored from it."""
        name = "five"
        with ThreadPoolExecutor(len(self.servers)) as threads:
            written = [
                threads.submit(self.lead.call, server, "Checkpoint", name=name, version=5) for server in self.servers
            ]
            gradient = self.contribute(5, reads=4)
            ahead = self.messages.LookAhead(lr=[0.002, 0.0])
            self.finish(5, 4, gradient, look_ahead=ahead, trainer_state=b"data from batch 5 on")
            parts = [answer.result().part for answer in written]
        for sealed in self.lead.everywhere("SealCheckpoint", name=name, parts=parts):
            assert sealed.parts == len(self.servers)
        for listed in self.lead.everywhere("ListCheckpoints"):
            [checkpoint] = listed.checkpoints
            assert (checkpoint.name, checkpoint.version, checkpoint.damage) == (name, 5, "")
            assert checkpoint.state_hash == self.reference.state_hash()
        self.export()
        saved, decided_by = self.reference.saved(), self.lead.incarnation
        self.finish(6, 5, self.contribute(6, reads=5))

        self.lead.everywhere("DeleteJob")
        self.lead, self.other = Lead(self.job), Rank(self.job, 1)
        self.lead.open()
        held = self.lead.everywhere("Restore", name=name, mode=self.messages.RESTORE_MODE_HOLD)
        assert len({answer.id for answer in held}) == 1, "all servers read the same contents"
        assert all(answer.progress.phase == self.messages.PHASE_LOADING for answer in held)
        self.lead.everywhere("Restore", name=name, mode=self.messages.RESTORE_MODE_WHOLE)
        for progress in self.lead.take_over():
            assert (progress.phase, progress.version) == (self.messages.PHASE_TRAINING, 5)
            assert progress.last_commit.trainer_state == b"data from batch 5 on"
        self.other.join()
        self.other.watch(self.servers[0])
        self.reference.restore(saved)
        self.compare(decided_by)
        self.finish(6, 5, self.contribute(6, reads=5))

    def export(self):
        """Exports the weights in fp32."""
        weights = np.full(self.job.layout.elements, np.nan, np.float32)
        for server in self.servers:
            *slices, end = server.stream("Export", job=self.job.name, dtype=self.messages.DTYPE_F32)
            assert end.end and end.version == self.reference.version
            for answer in slices:
                start = answer.shard * SHARD_ELEMENTS + answer.offset
                values = np.frombuffer(answer.payload, "<f4")
                weights[start : start + len(values)] = values
        assert_same_bits(weights, self.reference.weights, "the export")
