"""Rounds in which ranks say which unit each of them wants next, so that none waits for one that wants something else.

Ranks gather a unit together only if all of them want it now. Where a rank has left out a unit that others use, or has one here
that is away elsewhere, ranks want different units. Those that are furthest behind in the step then pull theirs alone, until all
want the same again. So each round ends, whatever the ranks run, as long as each goes on to a use of a unit or to ``step``.
"""

import contextlib
import zlib
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed

from longshore import _agree
from longshore.errors import LongshoreError, UsageError, WaitError

#: What a rank says in a round: how many meetings it has had, how often it has gone from forward to backward or back since then,
#: how far it is in that, and what it wants. The smallest is furthest behind.
_Wish = tuple[int, int, int, int]

#: In place of turns: whoever waits at a meeting is behind nobody who has not come there.
_MEETS = 1 << 40
#: What a rank that cannot go on says in place of its meetings.
_FAILED = -1


class Rounds:
    """One rank's part in them. Its process group is its own, since collectives of a group come in one order on all ranks."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world_size = _agree.place()
        timeout = _timeout()
        self._speech: Any = distributed.new_group(backend="gloo", timeout=timeout)
        #: What weights of this device are gathered in.
        self._group: Any = distributed.new_group(backend="gloo" if device.type == "cpu" else None, timeout=timeout)
        self._meetings = 0
        self._turn = 0
        self._was_backward = False

    def least(self, mine: int | None) -> int | None:
        """The least of a number that each rank has, or none has."""
        if mine is None:
            return None
        least = torch.tensor([mine])
        distributed.all_reduce(least, distributed.ReduceOp.MIN, self._speech)
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
        content = zlib.crc32(repr(tuple(what)).encode())
        return self._ends_together((self._meetings, self._turn, place, content), f"a use of unit {name}")

    def meet(self) -> None:
        """Waits until all ranks have come here, as they do where a step ends. Those that have not may use units meanwhile.

        Raises:
            LongshoreError: as in :meth:`agree`.
        """
        if not self._ends_together((self._meetings, _MEETS, 0, 0), "the end of a step"):
            raise UsageError("ranks end different steps: call step() as often on each of them, with the same accumulate=")
        self._meetings += 1
        self._turn, self._was_backward = 0, False

    def fail(self) -> None:
        """Tells the others that this rank cannot go on, if they can be told."""
        with contextlib.suppress(WaitError):
            self._say((_FAILED, 0, 0, 0), "an error of its own")

    def gather(self, weights: list[tuple[Tensor, int]]) -> None:
        """Gives all ranks the weights of which each has its part, in its place: their bytes end to end, and how many a part has."""
        works: list[Any] = []
        failure: RuntimeError | None = None
        for whole, part in weights:
            own = whole[self.rank * part : (self.rank + 1) * part]
            works.append(distributed.all_gather_into_tensor(whole, own, self._group, async_op=True))
        for work in works:
            try:
                work.wait()
            except RuntimeError as error:
                failure = error  # the others may still write
        if failure is not None:
            self._give_up("what they have pulled", failure)

    def _ends_together(self, wish: _Wish, where: str) -> bool:
        while True:
            wishes = self._say(wish, where)
            failed = [rank for rank, other in enumerate(wishes) if other[0] == _FAILED]
            if failed:
                raise LongshoreError(f"rank {failed[0]} could not get its part of a unit, so that no rank can go on: its own error says why")
            if all(other == wish for other in wishes):
                return True
            if wish == min(wishes):
                return False

    def _say(self, wish: _Wish, where: str) -> list[_Wish]:
        """By rank, what it says in this round."""
        said = torch.empty(self.world_size, len(wish), dtype=torch.int64)
        try:
            distributed.all_gather_into_tensor(said.view(-1), torch.tensor(wish), self._speech)
        except RuntimeError as error:
            self._give_up(where, error)
        return [tuple(other) for other in said.tolist()]

    def _give_up(self, where: str, error: Exception) -> NoReturn:
        raise WaitError(
            f"rank {self.rank} waited at {where} for the other ranks, and one has ended, or came to no use of a unit and to no step() "
            "within the timeout of init_process_group: look at the other ranks' errors, and have all ranks run the same passes and make the "
            f"same steps, or pass weights='whole' to shard(). torch.distributed says: {error}"
        ) from error


def _timeout() -> Any:
    """That of the default group, which a new one would not take over."""
    group: Any = distributed.distributed_c10d._get_default_group()
    return group._get_backend(group._device_types[0]).options._timeout
