"""A rank's side of the protocol: joining, pulling weights, pushing gradients and learning decisions."""

import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .layout import Layout, chunks, decode, encode
from .wire import Protocol, Server


@dataclass
class Job:
    """Settings that all ranks of a job know before its start."""

    protocol: Protocol
    addresses: list
    name: str
    spec: object
    layout: Layout
    dtype: str  # of gradients and images, in layout.py's terms
    wire_dtype: int  # the same, in the protocol's terms
    loss_scale: float  # of steps that read version 0

    def connect(self):
        """Connects to the servers, with the caller's own connections."""
        return [Server(self.protocol, number, address) for number, address in enumerate(self.addresses)]


@dataclass
class Pulled:
    """A version's image, the incarnation that decided it, and the loss scale for steps that read it."""

    version: int
    decided_by: int
    loss_scale: float
    weights: np.ndarray


class ChunkRefused(Exception):
    """A server refused a chunk of a Push."""

    def __init__(self, result):
        super().__init__(str(result))
        self.reason, self.field = result.refusal.kind, result.refusal.field


class Rank:
    """A process of a rank, with its own incarnation."""

    def __init__(self, job: Job, number: int):
        self.job, self.number, self.layout = job, number, job.layout
        self.servers, self.messages = job.connect(), job.protocol.messages
        self.incarnation = None
        self.version = 0  # the newest known version
        self.loss_scales = {}  # by known version
        self.kept = {}  # by server, the chunks of each step that it may ask for again
        self.events = None

    def everywhere(self, method: str, **fields):
        return [self.call(server, method, **fields) for server in self.servers]

    def call(self, server, method: str, **fields):
        return server.call(method, job=self.job.name, **fields)

    def join(self, **how):
        """Joins all servers, above every earlier incarnation of the rank. Returns each server's progress."""
        if self.incarnation is None:
            known = [rank for answer in self.everywhere("Describe", brief=True) for rank in answer.ranks]
            last = max((rank.incarnation for rank in known if rank.rank == self.number), default=0)
            self.incarnation = max(int(time.time() * 1e6), last + 1)
        answers = self.everywhere("Join", rank=self.number, incarnation=self.incarnation, **how)
        for progress in (answer.progress for answer in answers):
            decided = progress.HasField("last_commit")
            self._know(progress.version, progress.last_commit.loss_scale if decided else self.job.loss_scale)
        return [answer.progress for answer in answers]

    def leave(self):
        self.everywhere("Leave", rank=self.number, incarnation=self.incarnation)

    def _know(self, version: int, loss_scale: float):
        self.version = max(self.version, version)
        self.loss_scales[version] = loss_scale

    def watch(self, server):
        """Follows decisions after the newest known version on one server."""
        self.events = server.stream("Watch", job=self.job.name, after_step=self.version)

    def learn(self):
        """Waits for the next event. Returns its kind and its content."""
        event = next(self.events)
        kind = event.WhichOneof("event")
        if kind == "commit":
            self._know(event.commit.step, event.commit.loss_scale)
        return kind, getattr(event, kind)

    def pull(self, version: int) -> Pulled:
        """Pulls a whole version."""
        weights = np.full(self.layout.elements, np.nan, np.float32)
        decided_by = {
            who for server in self.servers for who in self.pull_from(server, version, weights)
        }
        assert len(decided_by) == 1, f"slices of two versions {version}: {decided_by}"
        return Pulled(version, decided_by.pop(), self.loss_scales[version], weights)

    def pull_from(self, server, version: int, weights):
        """Pulls one server's shards into the flat space. Returns the version's decider, as in each slice."""
        slices = [
            self.messages.Slice(shard=shard, offset=0, elements=part.stop - part.start)
            for shard, part in self.layout.owned(server.number)
        ]
        what = dict(job=self.job.name, rank=self.number, version=version, dtype=self.job.wire_dtype, slices=slices)
        for answer in server.stream("Pull", **what):
            assert zlib.crc32(answer.payload) == answer.crc32
            values = decode(answer.payload, self.job.dtype)
            start = self.layout.shards[answer.shard].start + answer.offset
            weights[start : start + len(values)] = values
            yield answer.decided_by

    def requests(self, server, step: int, reads: Pulled, gradients):
        """Yields the chunks that this rank contributes to one server's shards, in ascending micro-steps."""
        for micro_step, gradient in enumerate(gradients):
            for shard, part in self.layout.owned(server.number):
                for chunk, payload, crc32 in chunks(encode(gradient[part], self.job.dtype)):
                    yield self.messages.PushRequest(
                        job=self.job.name,
                        incarnation=self.incarnation,
                        rank=self.number,
                        step=step,
                        micro_step=micro_step,
                        shard=shard,
                        chunk=chunk,
                        loss_scale=reads.loss_scale,
                        dtype=self.job.wire_dtype,
                        crc32=crc32,
                        reads_version=reads.version,
                        reads_decided_by=reads.decided_by,
                        payload=payload,
                    )

    def push(self, step: int, reads: Pulled, gradients, servers=None):
        """Pushes the gradients of all micro-steps, and retains them."""
        self.kept[step] = [list(self.requests(server, step, reads, gradients)) for server in self.servers]
        return self.push_again(step, servers)

    def push_again(self, step: int, servers=None):
        """Pushes a step's retained chunks to all servers, or some, at once. Returns the results; none may be a refusal."""
        servers = self.servers if servers is None else servers
        with ThreadPoolExecutor(len(servers)) as threads:
            results = list(threads.map(lambda server: server.push(self.kept[step][server.number]), servers))
        for server, found in zip(servers, results):
            for result in found:
                if result.HasField("refusal"):
                    raise ChunkRefused(result)
            assert len(found) == len(self.kept[step][server.number]), "each chunk is answered"
        return [result for found in results for result in found]

    def forget(self):
        """Drops gradients that no server can ask for again: the commit of the next step means that all servers have this one for good.

        On tier nvme a server may still step back from a version that it cannot read any more.
        """
        oldest = self.version - (1 if self.job.spec.tier == self.messages.TIER_NVME else 0)
        self.kept = {step: kept for step, kept in self.kept.items() if step >= oldest}
