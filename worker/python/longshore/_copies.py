"""Copies of weights in the host's memory: of frozen ones, or a rank's part of these, and of all once no server will be there."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from longshore import _unit_tensors
from longshore._gathered import Share, share
from longshore._rounds import Rounds
from longshore._units import Member


class Copies:
    """What is kept of the members of a model, so that servers need not be asked for it.

    Args:
        rounds: in which ranks that gather weights say what they want; None where each has all of what it keeps.
        memory: makes memory for a tensor.
    """

    def __init__(self, rounds: Rounds | None, memory: Callable[[Tensor], Tensor]) -> None:
        self._rounds = rounds
        self._memory = memory
        self._whole: dict[int, Tensor] = {}
        #: By frozen member whose other parts come from other ranks: it, and what this rank keeps of it, each piece with its first
        #: element.
        self._parts: dict[int, tuple[Member, list[tuple[Tensor, int]]]] = {}

    def take(self, member: Member) -> None:
        """Keeps a frozen member: this rank's part alone, where servers and the other ranks have the rest."""
        copy = _unit_tensors.built(member.tensor)
        if member.kept is not None and share_of(self._rounds, member.tensor) is not None:
            self._take_part(member, member.tensor if copy is None else copy)
        elif copy is not None:
            self._whole[id(member)] = copy
        else:
            self.write(member)

    def write(self, member: Member) -> None:
        """Keeps all of a member as it is now, from which it comes from now on."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            kept = self._whole.get(id(member))
            if kept is None:
                kept = self._whole[id(member)] = self._memory(member.tensor)
            kept.copy_(member.tensor)

    def _take_part(self, member: Member, weights: Tensor) -> None:
        of_rank = share_of(self._rounds, weights)
        assert of_rank is not None
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            flat = weights.reshape(-1)
            parts = [(flat[start : start + elements], start) for start, elements in of_rank.own]
            self._parts[id(member)] = member, [(self._memory(part).copy_(part), start) for part, start in parts]

    def take_all_of(self, names: Iterable[str]) -> None:
        """Keeps all of these frozen members instead of a part, before their memory goes."""
        wanted = set(names)
        for key, (member, _) in list(self._parts.items()):
            if member.name in wanted:
                del self._parts[key]
                copy = _unit_tensors.built(member.tensor)
                if copy is None:
                    self.write(member)
                else:
                    self._whole[key] = copy

    def whole(self, member: Member) -> Tensor | None:
        """All of a member, where that is kept."""
        return self._whole.get(id(member))

    def parts(self, member: Member) -> list[tuple[Tensor, int]] | None:
        """The pieces that this rank keeps of a member, each with its first element, where it keeps a part."""
        found = self._parts.get(id(member))
        return None if found is None else found[1]

    def in_parts(self) -> list[tuple[Member, list[tuple[Tensor, int]]]]:
        """The members of which this rank keeps a part, the same ones on all ranks, and these parts."""
        return list(self._parts.values())

    def forget_written(self, member: Member) -> None:
        """Lets go of what somebody wrote to a member of which a part is kept."""
        if id(member) in self._parts:
            self._whole.pop(id(member), None)

    def forget_all_but(self, members: set[int]) -> None:
        """Lets go of what is kept whole of any other members than these, by ``id``."""
        self._whole = {key: kept for key, kept in self._whole.items() if key in members}

    def add(self, whole: dict[int, Tensor]) -> None:
        """Has these members, by ``id``, come from these copies. What somebody wrote to one stays."""
        self._whole = whole | self._whole

    def end_parts(self) -> None:
        """Has no member come from a part any more."""
        self._parts.clear()


def share_of(rounds: Rounds | None, target: Tensor) -> Share | None:
    """What this rank has to bring of a member before ranks gather it; None where it is all of it."""
    if rounds is None or not target.is_contiguous():
        return None
    return share(target.numel(), target.element_size(), rounds.rank, rounds.world_size)
