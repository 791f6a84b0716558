"""A delayed job with partitions: each rank contributes to its own parameters."""

import numpy as np

from .layout import BLOCK
from .play import Play, job_on


class Partitions(Play):
    """Two ranks, each a contributor of one partition. The job continues from another optimizer's state."""

    def __init__(self, protocol, addresses, dtype: str, tier: str):
        more = dict(contributors={0: [0], 2: [1]}, micro_steps=1)
        super().__init__(job_on(protocol, addresses, "stock-partitions", dtype, tier, **more))
        self.reference.trained(applied=30)

    def play(self):
        self.start()
        ahead = self.messages.LookAhead(lr=[3e-3, 0.0])
        first = self.contribute(1, reads=0)
        second = self.contribute(2, reads=0)
        self.finish(1, 0, first, look_ahead=ahead)
        self.finish(2, 0, second, look_ahead=ahead)
        assert self.finish(3, 1, self.contribute(3, 1, overflows), look_ahead=ahead).commit.skip
        self.lead.leave()
        self.other.leave()


def overflows(rank, gradients):
    if rank.number == 1:
        gradients[0][rank.layout.partitions[1].part.start + BLOCK] = np.inf
