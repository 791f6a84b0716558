"""What of the units is on the device now."""

import warnings

import torch

from longshore._units import Member, Unit
from longshore.errors import UsageError, invalid


class Present:
    """Counts the members that are on the device, so that nobody has to look at all units at each use of one.

    Attributes:
        nbytes: of all of them.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        #: By unit of which something is here: how many members, and their bytes.
        self._of: dict[Unit, tuple[int, int]] = {}

    def add(self, member: Member) -> None:
        """It has memory."""
        members, nbytes = self._of.get(member.unit, (0, 0))
        self._of[member.unit] = members + 1, nbytes + member.nbytes
        self.nbytes += member.nbytes
        member.is_here = True

    def remove(self, member: Member) -> None:
        """It has none any more."""
        members, nbytes = self._of.pop(member.unit)
        if members > 1:
            self._of[member.unit] = members - 1, nbytes - member.nbytes
        self.nbytes -= member.nbytes
        member.is_here = False

    def has(self, unit: Unit) -> bool:
        """Whether something of it is here."""
        return unit in self._of

    def has_all(self, unit: Unit) -> bool:
        """Whether all of it is here."""
        return self._of.get(unit, (0, 0))[0] == len(unit.members)

    def nbytes_of(self, unit: Unit) -> int:
        """The bytes of what is here of it."""
        return self._of.get(unit, (0, 0))[1]

    def unpinned(self) -> list[Unit]:
        """The units of which something is here, and which may go."""
        return [unit for unit in self._of if unit.pins == 0]


def size(member: Member, nbytes: int) -> None:
    """Gives a member memory, or takes it. What NumPy has got within a forward, where nobody is asked, torch does not let go of: it stays."""
    if member.memory.resizable():
        member.memory.resize_(nbytes)
    elif not nbytes:
        warnings.warn(
            f"an array of NumPy has the memory of {member.name} of unit {member.unit.name}, which stays on the device beside the budget, and new "
            "weights are written there: copy the weights with .clone() before .numpy()",
            UserWarning,
            stacklevel=2,
        )


def check_here(members: list[Member]) -> None:
    """Refuses to use what could not be fetched."""
    for member in members:
        if not member.is_here:
            raise UsageError(
                f"{member.name} of unit {member.unit.name} is used after its gradient has left, and with delay=1 servers do not keep "
                "the weights that it was computed with: call step() first, or zero_grad(), which gives the step up"
            )


def check_same(unit: Unit) -> None:
    """Refuses a model that was changed under this."""
    for member in unit.members:
        for module, name in member.owners:
            if module._parameters.get(name) is not member.tensor:
                raise invalid(
                    member.name,
                    "another parameter now",
                    f"the one that unit {unit.name} had when shard() was called",
                    "change the model first, then build the optimizer and call shard()",
                    UsageError,
                )
        with torch._C.DisableTorchFunctionSubclass():
            memory = member.tensor.untyped_storage()._cdata
        if memory != member.memory._cdata:
            raise invalid(
                member.name,
                "in other memory now",
                f"in that which unit {unit.name} had when shard() was called",
                "move and cast the model before the optimizer is built",
                UsageError,
            )
