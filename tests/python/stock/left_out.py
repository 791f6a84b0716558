"""A job with leave_out: a step leaves out parameters without a gradient, as torch does."""

import numpy as np

from .layout import BLOCK, marked
from .lead import Lead
from .play import Play, job_on, refused

EMBED, BIAS, SCALE, HEAD = range(4)


class LeftOut(Play):
    """Each act makes a step, or is refused. A parameter is left out if no rank and no micro-step has its gradient."""

    def __init__(self, protocol, addresses, dtype: str, tier: str):
        super().__init__(job_on(protocol, addresses, "stock-left-out", dtype, tier, leave_out=True))

    def play(self):
        self.start()
        self.first()
        self.overflow()
        self.refusals()
        self.lead = Lead(self.job)
        self.lead.take_over()  # learns the parameters left out from the last commit
        self.finish(4, 3, self.without(4, 3, {}))
        entries = [(entry.param, entry.steps, entry.now) for entry in self.lead.left_out]
        assert entries == [(EMBED, 1, False), (BIAS, 2, False)], entries
        self.lead.leave()
        self.other.leave()

    def without(self, step: int, reads: int, missing, change=lambda rank, gradients: None):
        """Contributes without gradients of `missing`: parameters by (rank, micro-step), or None for all."""

        def leave_out(rank, gradients):
            change(rank, gradients)
            for micro_step, gradient in enumerate(gradients):
                absent = missing.get((rank.number, micro_step), missing.get(None, set()))
                gradients[micro_step] = marked(gradient, self.job.layout.parameters, absent)

        return self.contribute(step, reads, leave_out)

    def first(self):
        """The bias has no gradient. The scale has a gradient of -0 in one micro-step of one rank, which counts."""

        def minus_zero(rank, gradients):
            for gradient in gradients:
                gradient[self.job.layout.parameters[SCALE]] = -0.0

        bias_alone = {None: {BIAS, SCALE}, (1, 0): {BIAS}}
        decision = self.finish(1, 0, self.without(1, 0, bias_alone, minus_zero))
        assert [entry.param for entry in decision.commit.left_out] == [BIAS]
        # The embedding lies on several servers. Like the bias, which is left out again, it gets no look-ahead.
        ahead = self.messages.LookAhead(lr=[0.002, 0.001])
        decision = self.finish(2, 1, self.without(2, 1, {None: {EMBED, BIAS}}), look_ahead=ahead)
        assert [(entry.param, entry.steps) for entry in decision.commit.left_out] == [(EMBED, 1), (BIAS, 2)]

    def overflow(self):
        """A skipped step repeats the list, whatever gradients it lacked."""

        def overflows(rank, gradients):
            gradients[0][self.job.layout.parameters[HEAD].start + BLOCK] = np.inf

        before = list(self.lead.left_out)
        decision = self.finish(3, 2, self.without(3, 2, {None: {SCALE}}, overflows))
        assert decision.commit.skip and list(decision.commit.left_out) == before

    def refusals(self):
        """Servers refuse a list that does not follow from the last one. A parameter's first element says whether it has a gradient."""
        self.gradient = self.without(4, 3, {})
        decision = self.decide(4, 3, self.without(4, 3, {}))
        skipped = self.messages.LeftOut(param=SCALE, steps=2, now=True)
        decision.commit.left_out.append(skipped)
        refused(lambda: self.lead.commit(decision), "INVALID", "commit.left_out")
        decision.commit.left_out[-1].steps = 1
        start = self.job.layout.parameters[SCALE].start
        owner = self.job.layout.owners[start // self.job.layout.shard_elements]
        refused(lambda: self.lead.commit(decision, [self.servers[owner]]), "CONFLICT", "commit.left_out")
