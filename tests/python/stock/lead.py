"""Rank 0's additional tasks: opening the job, deciding steps, and taking over from a dead rank 0."""

import math
from dataclasses import dataclass

from .layout import chunks, encode
from .rank import Job, Rank


@dataclass
class Decision:
    """A step's commit, and for each server the origin of its contributions."""

    commit: object
    origins: list


class Lead(Rank):
    """A process of rank 0."""

    def __init__(self, job: Job):
        super().__init__(job, 0)

    def open(self):
        placement = self.messages.Placement(epoch=1, servers=self.job.addresses, owners=self.layout.owners)
        return [
            server.call("OpenJob", spec=self.job.spec, placement=placement, server=server.number)
            for server in self.servers
        ]

    def upload(self, weights):
        """Uploads initial weights, each shard to its owner. Returns the chunks that each server took."""
        return [
            server.upload(
                self.messages.UploadRequest(
                    job=self.job.name,
                    incarnation=self.incarnation,
                    shard=shard,
                    chunk=chunk,
                    crc32=crc32,
                    payload=payload,
                )
                for shard, part in self.layout.owned(server.number)
                for chunk, payload, crc32 in chunks(encode(weights[part], "f32"))
            ).chunks
            for server in self.servers
        ]

    def take_over(self):
        """Joins as a new process of rank 0: fences all earlier ones, brings the servers to one version, and joins."""
        found = self.join(fence_only=True)
        newest = max(found, key=lambda progress: progress.version)
        for server, progress in zip(self.servers, found):
            if progress.version < newest.version:
                self.call(server, "Commit", incarnation=self.incarnation, commit=newest.last_commit)
        return self.join()

    def stats(self, step: int):
        """Returns all blocks' statistics in block order, and each server's origin."""
        shards, origins = {}, []
        for server in self.servers:
            answers = list(server.stream("Stats", job=self.job.name, step=step))
            shards |= {answer.shard: list(answer.blocks) for answer in answers}
            known = all(answer.origin for answer in answers)
            origins.append(sum(answer.origin for answer in answers) % 2**64 if known else 0)
        assert sorted(shards) == list(range(len(self.layout.shards))), sorted(shards)
        return [block for shard in sorted(shards) for block in shards[shard]], origins

    def decide(self, step: int, loss_scale: float, clip: float, hypers, **more) -> Decision:
        """Decides a step whose contributions have this loss scale. An overflow halves the scale for later steps."""
        blocks, origins = self.stats(step)
        total = 0.0  # not sum(), which corrects its rounding in newer Pythons
        for block in blocks:
            total += block.sum_squares
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
            **more,
        )
        return Decision(commit, origins)

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
        return answers
