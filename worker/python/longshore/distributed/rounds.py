"""Rounds in which ranks say which unit each of them wants next, so that none waits for one that wants something else.

Ranks gather a unit together only if all of them want it now. Where a rank has left out a unit that others use, or has one here
that is away elsewhere, ranks want different units. Those that are furthest behind in the step then pull theirs alone, until all
want the same again. So each round ends, whatever the ranks run, as long as each goes on to a use of a unit or to ``step``.
"""

import contextlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed

from longshore.distributed import agree as _agree
from longshore.distributed import collectives
from longshore.errors import LongshoreError, UsageError, WaitError

#: What a rank says in a round: how many meetings it has had, how often it has gone from forward to backward or back since then,
#: how far it is in that, and what it wants. The smallest is furthest behind.
_Wish = tuple[int, int, int, int]

#: In place of turns: whoever waits at a meeting is behind nobody who has not come there.
_MEETS = 1 << 40
#: What a rank that cannot go on says in place of its meetings.
_FAILED = -1
#: What one says there that ends, and uses nothing any more: it is behind nobody.
_ENDS = 1 << 40


class Rounds:
    """One rank's part in them. Its process group is its own, since collectives of a group come in one order on all ranks.

    Attributes:
        is_over: whether a rank has failed or gone, so that no other one is to be waited for any more.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world_size = _agree.place()
        collectives.begin()
        timeout = _agree.timeout()
        self._speech: Any = distributed.new_group(backend="gloo", timeout=timeout)
        #: What weights of this device are gathered in.
        self._group: Any = distributed.new_group(backend="gloo" if device.type == "cpu" else None, timeout=timeout)
        self.is_over = False
        self._meetings = 0
        self._turn = 0
        self._was_backward = False

    def least(self, mine: int | None) -> int | None:
        """The least of a number that each rank has, or none has."""
        if mine is None:
            return None
        least = torch.tensor([mine])
        work = distributed.all_reduce(least, distributed.ReduceOp.MIN, self._speech, async_op=True)
        collectives.wait(work, "the least budget of all ranks")
        return int(least.item())

    def agree(self, name: str, place: int, what: Iterable[int | str], *, is_backward: bool) -> bool:
        """Says that this rank wants a unit.

        Args:
            name: the unit's.
            place: where it lies in the order in which units are used.
            what: the version and the weights of it that are wanted.

        Returns:
            Whether all ranks want the same now. Otherwise this one must do without the others.

        Raises:
            LongshoreError: where another rank has failed, or has not come here in time.
        """
        self._turn += is_backward is not self._was_backward
        self._was_backward = is_backward
        return self._ends_together((self._meetings, self._turn, place, _digest(what)), f"a use of unit {name}")

    def meet(self) -> None:
        """Waits until all ranks have come here, as they do where a step ends. Those that have not may use units meanwhile.

        Raises:
            LongshoreError: as in :meth:`agree`.
        """
        if not self._ends_together((self._meetings, _MEETS, 0, 0), "the end of a step"):
            remedy = "call step() as often on each of them, with the same accumulate=, and close() after the same step"
            raise UsageError(f"ranks end different steps: {remedy}")
        self._meetings += 1
        self._turn, self._was_backward = 0, False

    def end(self, what: Iterable[int | str]) -> bool:
        """Waits until all ranks end. Those that do not may use units meanwhile.

        Args:
            what: the version and the weights that this rank ends with.

        Returns:
            Whether all ranks are here, and want the same.

        Raises:
            LongshoreError: as in :meth:`agree`.
        """
        return self._ends_together((_ENDS, _MEETS, self._meetings, _digest(what)), "close()")

    @contextlib.contextmanager
    def last(self) -> Iterator[None]:
        """What ranks do together at the end: where Ctrl-C ends it on this one, the others may have done it, and are not waited for
        again."""
        try:
            yield
        except BaseException:
            self.is_over = True
            raise

    def fail(self) -> None:
        """Tells the others that this rank cannot go on, if they can be told."""
        self.is_over = True
        with contextlib.suppress(LongshoreError):
            self._say((_FAILED, 0, 0, 0), "an error of its own")

    def gather(self, weights: list[tuple[Tensor, int]], *, on_host: bool = False) -> None:
        """Gives all ranks the weights of which each has its part, in its place: their bytes end to end, and how many a part has.
        They lie on the device, or all of them in the host's memory."""
        group = self._speech if on_host else self._group
        gathering = []
        failure: RuntimeError | None = None
        for whole, part in weights:
            own = whole[self.rank * part : (self.rank + 1) * part]
            gathering.append(collectives.all_gather(whole, own, group))
        for collective in gathering:
            try:
                collective.wait("units that ranks gather")
            except RuntimeError as error:
                failure = error  # the others may still write
        if failure is not None:
            self._give_up("what they have pulled", failure)

    def _ends_together(self, wish: _Wish, where: str) -> bool:
        while True:
            wishes = self._say(wish, where)
            failed = [rank for rank, other in enumerate(wishes) if other[0] == _FAILED]
            if failed:
                self.is_over = True
                raise LongshoreError(f"rank {failed[0]} could not get its part of a unit, so that no rank can go on: its own error says why")
            if all(other == wish for other in wishes):
                return True
            if any(other[0] == _ENDS for other in wishes) and all(other[1] == _MEETS for other in wishes):
                # Some end and others have made a step, so that they will never want the same.
                self.is_over = True
                return False
            if wish == min(wishes):
                return False

    def _say(self, wish: _Wish, where: str) -> list[_Wish]:
        """By rank, what it says in this round."""
        said = torch.empty(self.world_size, len(wish), dtype=torch.int64)
        try:
            work = distributed.all_gather_into_tensor(said.view(-1), torch.tensor(wish), self._speech, async_op=True)
            collectives.wait(work, where)
        except RuntimeError as error:
            self._give_up(where, error)
        return [tuple(other) for other in said.tolist()]

    def _give_up(self, where: str, error: Exception) -> NoReturn:
        self.is_over = True
        if isinstance(error, LongshoreError) and not isinstance(error, WaitError):
            raise error  # another rank has said why
        raise WaitError(
            f"rank {self.rank} waited at {where} for the other ranks, and one has ended, or came to no use of a unit and to no step() "
            "within the timeout of init_process_group: look at the other ranks' errors, and have all ranks run the same passes and make the "
            f"same steps, or pass weights='whole' to shard(). torch.distributed says: {error}"
        ) from error


def _digest(what: Iterable[int | str]) -> int:
    return zlib.crc32(repr(tuple(what)).encode())
