"""A job with worker_local: each rank amends the weights of a delayed step with the gradient that it holds."""

import numpy as np

from .layout import ALIGN, BLOCK
from .play import Play, job_on
from .update import assert_same_bits


class Amended(Play):
    """Two ranks, each of which contributes to a partition of its own. The job goes on from another optimizer's state."""

    def __init__(self, protocol, addresses, dtype: str, tier: str):
        partitions = {0: [0], 2: [1]}
        more = dict(contributors=partitions, micro_steps=1, worker_local=True)
        super().__init__(job_on(protocol, addresses, "stock-amended", dtype, tier, **more))
        self.reference.trained(applied=30)

    def play(self):
        self.start()
        lacks, amend = self.messages.WorkerLocal(lr=[3e-3, 0.0]), self.messages.Amend(gamma=0.7)
        first = self.contribute(1, reads=0)
        self.finish(1, 0, first, worker_local=lacks)
        self.compare_rates(1)
        second = self.finish(2, 0, self.contribute(2, reads=0), worker_local=lacks, amend=amend).commit
        third = self.finish(3, 1, self.contribute(3, 1, amends=second), worker_local=lacks, amend=amend).commit
        skipped = self.finish(4, 2, self.contribute(4, 2, overflows, amends=third), worker_local=lacks).commit
        assert skipped.skip
        self.compare_rates(4)
        fifth = self.finish(5, 3, self.contribute(5, 3), worker_local=lacks, amend=amend).commit
        self.finish(6, 4, self.contribute(6, 4, amends=fifth), amend=amend)
        assert np.isnan(self.lead.pull(6).rates).all(), "nothing is to be amended"
        self.lead.leave()
        self.other.leave()

    def compare_rates(self, version: int):
        """Those of the groups that parameters cover."""
        found, expected = self.lead.pull(version).rates, self.reference.rates[version]
        for part in self.job.layout.parameters:
            groups = slice(part.start // ALIGN, -(-part.stop // ALIGN))
            assert_same_bits(found[groups], expected[groups], f"the rates of version {version}")


def overflows(rank, gradients):
    if rank.number == 1:
        gradients[0][rank.layout.partitions[1].part.start + BLOCK] = np.inf
