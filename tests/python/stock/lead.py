"""Rank 0's tasks beside a rank's work: opening the job, deciding steps, and taking over from a dead rank 0."""

import math
from dataclasses import dataclass

from .layout import BLOCK, chunks, encode
from .rank import Job, Rank
from .wire import Refused


@dataclass
class Decision:
    """A step's commit, and for each server the origin of its contributions."""

    commit: object
    origins: list


class Lead(Rank):
    """A process of rank 0."""

    def __init__(self, job: Job):
        super().__init__(job, 0)
        self.left_out = []  # from the newest commit that this process knows

    def open(self):
        placement = self.messages.Placement(epoch=1, servers=self.job.addresses, owners=self.layout.owners)
        return [
            server.call("OpenJob", spec=self.job.spec, placement=placement, server=server.number)
            for server in self.servers
        ]

    def upload(self, arrays, applied: int = 0):
        """Uploads initial weights, and moments after `applied` updates, each shard to its owner. Returns the chunks that each server took.
        """
        return [
            server.upload(
                self.messages.UploadRequest(
                    job=self.job.name,
                    incarnation=self.incarnation,
                    shard=shard,
                    chunk=chunk,
                    crc32=crc32,
                    payload=payload,
                    array=array,
                    applied=applied or None,
                )
                for shard, part in self.layout.owned(server.number)
                for array, values in enumerate(arrays)
                for chunk, payload, crc32 in chunks(encode(values[part], "f32"))
            ).chunks
            for server in self.servers
        ]

    def take_over(self):
        """Joins as a new process of rank 0: fences all earlier ones, brings the servers to one version, and joins."""
        found = self.join(fence_only=True)
        newest = max(found, key=lambda progress: progress.version)
        self.left_out = list(newest.last_commit.left_out)
        behind = [server for server, progress in zip(self.servers, found) if progress.version < newest.version]
        try:
            for server in behind:
                self.call(server, "Commit", incarnation=self.incarnation, commit=newest.last_commit)
        except Refused as refused:
            if refused.reason != "PRECONDITION":
                raise
            self.step_back()
        return self.join()

    def step_back(self):
        """Takes the newest step back if a server has lost its contributions."""
        versions = [answer.progress.version for answer in self.everywhere("Describe", brief=True)]
        for server, version in zip(self.servers, versions):
            if version > min(versions):
                self.call(server, "StepBack", incarnation=self.incarnation, version=min(versions))
        self.version = min(versions)

    def stats(self, step: int):
        """Returns all blocks' statistics in block order, each server's origin, and the parameters without a gradient."""
        shards, origins, missing = {}, [], set()
        for server in self.servers:
            answers = list(server.stream("Stats", job=self.job.name, step=step))
            shards |= {answer.shard: list(answer.blocks) for answer in answers}
            missing |= {parameter for answer in answers for parameter in answer.left_out}
            known = all(answer.origin for answer in answers)
            origins.append(sum(answer.origin for answer in answers) % 2**64 if known else 0)
        assert sorted(shards) == list(range(len(self.layout.shards))), sorted(shards)
        return [block for shard in sorted(shards) for block in shards[shard]], origins, missing

    def decide(self, step: int, loss_scale: float, clip: float, hypers, **more) -> Decision:
        """Decides a step whose contributions have this loss scale. An overflow halves the scale for later steps."""
        blocks, origins, missing = self.stats(step)
        total = 0.0  # not sum(), which corrects its rounding in newer Pythons
        for number, block in enumerate(blocks):
            ranks = self.layout.contributors(slice(number * BLOCK, (number + 1) * BLOCK))
            total += block.sum_squares / (len(ranks) / self.job.spec.world_size) ** 2
        gradient_scale = loss_scale * self.job.spec.world_size * self.job.spec.micro_steps
        norm = math.sqrt(total) / gradient_scale
        skip = any(block.HasField("first_nonfinite") for block in blocks) or not math.isfinite(norm)
        commit = self.messages.Commit(
            step=step,
            skip=skip,
            gradient_scale=gradient_scale,
            clip_coefficient=1.0 if skip else min(1.0, clip / (norm + 1e-6)),
            groups=[self.messages.Hyper(**hyper) for hyper in hypers],
            norm=norm,
            loss_scale=loss_scale / 2 if skip else loss_scale,
            decided_by=self.incarnation,
            left_out=self.left_out if skip else self._with_left_out(missing),
            **more,
        )
        return Decision(commit, origins)

    def _with_left_out(self, missing):
        """Returns the last commit's list with this step's parameters without a gradient."""
        steps = {entry.param: entry.steps for entry in self.left_out}
        steps |= {param: steps.get(param, 0) + 1 for param in missing}
        return [
            self.messages.LeftOut(param=param, steps=steps[param], now=param in missing) for param in sorted(steps)
        ]

    def commit(self, decision: Decision, servers=None):
        """Sends a decision to all servers, or to some. Before that no server may lose the last version."""
        self.everywhere("AwaitDurable", version=decision.commit.step - 1)
        return self.send(decision, servers)

    def send(self, decision: Decision, servers=None):
        answers = [
            self.call(
                server,
                "Commit",
                incarnation=self.incarnation,
                commit=decision.commit,
                origin=decision.origins[server.number],
            )
            for server in (self.servers if servers is None else servers)
        ]
        self._know(decision.commit.step, decision.commit.loss_scale)
        self.left_out = list(decision.commit.left_out)
        return answers

    def complete_resume(self):
        """Resumes the job on all servers, once an operator's resume has reached one of them."""
        found = [answer.progress for answer in self.everywhere("Describe", brief=True)]
        paused = self.messages.PHASE_PAUSED
        resumed = next(progress for progress in found if progress.phase != paused)
        scale = resumed.last_commit.loss_scale
        for server, progress in zip(self.servers, found):
            if progress.phase == paused:
                self.call(server, "Resume", version=progress.version, loss_scale=scale)
        self._know(resumed.version, scale)
