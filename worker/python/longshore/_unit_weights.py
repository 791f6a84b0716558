"""The weights of a job whose model is in units: what arrives is fetched unit by unit."""

import contextlib
import sys
from typing import Any

from torch import Tensor

from longshore._fetching import Fetcher
from longshore._host import Place
from longshore._params import Param
from longshore._residency import Residency
from longshore.errors import LongshoreError


class UnitWeights:
    """Stands where :class:`longshore._weights.Weights` does."""

    def __init__(self, home: Residency, fetcher: Fetcher, job: Any) -> None:
        self._home, self._fetcher, self._job = home, fetcher, job
        self._members = {
            member.param.index: member for unit in home.units for member in unit.members if member.param is not None
        }
        self._frozen = [member for unit in home.units for member in unit.members if member.kept is not None]

    def belong_to(self, job: Any) -> "UnitWeights":
        """Weights come from this job from now on, once it was started: the one before was given up for a checkpoint."""
        self._home.renew()
        self._job = job
        self._fetcher.belong_to(job)
        return self

    def values(self) -> tuple[list[Place], list[Tensor]]:
        """Nothing: a job that is found has its weights, and none is filled from a model in units."""
        return [], []

    def is_awaited(self, param: Param) -> bool:
        """Whether the parameter's newest weights were never fetched. No gradient can come of it then."""
        return self._fetcher.has_unread(self._members[param.index])

    def expect(self) -> None:
        """New weights come, for all parameters."""
        version = self._job.unread_weights()
        if version is not None:
            self._home.renew()
            self._fetcher.expect(version)
            # Last, so that it is all done again where it was interrupted.
            self._job.take_unread_weights()

    def read(self) -> None:
        """Does the same: units are fetched when they are used."""
        self.expect()

    def read_frozen(self) -> set[int]:
        """Reads the frozen weights of units that servers keep, as far as they are kept here. Returns their places in the job."""
        self._home.let_go_of(self._frozen)
        self._fetcher.read_frozen(self._frozen)
        return {member.kept.index for member in self._frozen if member.kept is not None}

    def meet(self) -> None:
        """Where ranks gather units: waits until all of them have used those that they still want, before they wait for each
        other in another way."""
        if self._fetcher.rounds is not None:
            self._fetcher.rounds.meet()

    def finish_copies(self) -> None:
        """Waits until no device copies weights from a server's memory, before a step's last gradient has left."""
        if self._fetcher.lending is not None:
            self._fetcher.lending.finish()

    def release(self) -> None:
        """The job is closed: no device copies from a server's memory any more."""
        if self._fetcher.lending is not None:
            self._fetcher.lending.release()

    def settle(self) -> None:
        """The job ends: its last weights stay in the host's memory, and the model can be used."""
        members = [*self._members.values(), *self._frozen]
        try:
            self._home.give_up_all()
            # Where an exception ends this rank, the others may be anywhere.
            if sys.exception() is None:
                self._fetcher.gather_all(members)
            self._fetcher.keep_all(members)
        finally:
            self.release()
            self._fetcher.close()

    def give_up(self) -> None:
        """The job is joined again: what it has for the step in hand is of no use."""
        self._home.renew()

    def abandon(self) -> None:
        """The optimizer is gone: a model that outlives it has the newest weights, if they can be had. What is frozen stays with
        the servers, which change it for nobody."""
        # Garbage collection may call this anywhere, also where a lock is held: it waits for no thread of ours and for no rank.
        with contextlib.suppress(LongshoreError):
            self._fetcher.keep_all([*self._members.values()])
        self.release()
        self._fetcher.retire()

    def forget(self) -> None:
        """Lets the parameters be as they are."""
