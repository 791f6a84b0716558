"""``longshore.shard``: trains a model larger than its device, with a part of its weights resident at a time.

:func:`shard` runs once, on the training thread. From then on :class:`UnitWeights` stands for the weights of the optimizer's job.
"""

import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from longshore.distributed import collectives
from longshore.errors import LongshoreError, UsageError, invalid
from longshore.optimizer.connection import Connection
from longshore.optimizer.step import Stepping
from longshore.transfer import device as _device
from longshore.transfer import params, partitions, tensors
from longshore.transfer.pinned import Lending
from longshore.transfer.tensors import UnitParameter, UnitTensor
from longshore.transfer.weights import JobWeights
from longshore.units import model as _model
from longshore.units.fetching import Fetcher
from longshore.units.hooks import ModuleHooks, Saving
from longshore.units.model import Member, Named, Spans, Unit, in_one_piece
from longshore.units.residency import Residency
from longshore.units.rounds import Rounds


class Sharded:
    """A model in units, as :func:`shard` made it.

    Attributes:
        budget: bytes for weights and gradients; None for no limit.
        units: the names of its units, in the model's order.
        weights: whether ranks have them ``"whole"`` from the servers, or ``"gathered"``.
    """

    def __init__(self, home: Residency, fetcher: Fetcher, budget: int | None, resting: int) -> None:
        self._home, self._fetcher = home, fetcher
        self.weights = "whole" if fetcher.rounds is None else "gathered"
        self._resting = resting
        self.budget = budget
        self.units = [unit.name for unit in home.units]

    @property
    def resident(self) -> list[str]:
        """Names of the units that are resident now, whole or in part."""
        return [unit.name for unit in self._home.units if any(member.is_here for member in unit.members)]

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on the device now."""
        return self._home.here + self._resting

    @property
    def peak_weight_bytes(self) -> int:
        """Largest value of :attr:`weight_bytes` since :func:`shard`."""
        return self._home.peak + self._resting

    @property
    def fetched_bytes(self) -> int:
        """Bytes of weights brought to the device so far."""
        return self._home.fetched

    @property
    def pulled_bytes(self) -> int:
        """Bytes of weights that this rank has pulled from servers so far, in the parameters' types."""
        return self._fetcher.pulled

    def release(self) -> None:
        """Releases all weights that are not in use, for example before another program needs the device."""
        self._home.release()


class UnitWeights(JobWeights):
    """Takes the place of :class:`longshore.transfer.weights.Weights` for a model in units."""

    def __init__(self, home: Residency, fetcher: Fetcher, job: Any) -> None:
        self._home, self._fetcher, self._job = home, fetcher, job
        self.awaited = fetcher.unread
        #: The version with which an abandoned step begins anew, until its weights are expected. None at other times.
        self._held: int | None = None
        self._members = {
            member.param.index: member for unit in home.units for member in unit.members if member.param is not None
        }
        self._frozen = [member for unit in home.units for member in unit.members if member.kept is not None]

    def check_unused(self) -> None:
        """Refuses new weights while units are in use."""
        self._home.check_unused()

    def belong_to(self, job: Any, held: int | None) -> "UnitWeights":
        """Switches to a job that was started anew. ``held`` is None after a return to a checkpoint. Otherwise an
        abandoned step begins again with the weights of version ``held``."""
        self._home.renew(are_same=held is not None)
        self._job, self._held = job, held
        self._fetcher.belong_to(job)
        return self

    @property
    def lending(self) -> Lending | None:  # type: ignore[override]
        return self._fetcher.lending

    def expect(self) -> None:
        """Notes that new weights come for all parameters."""
        version = self._job.unread_weights()
        if version is not None:
            self._home.renew(are_same=version == self._held)
            self._held = None
            self._fetcher.expect(version)
            # This call comes last, so that an interrupted expect() is repeated as a whole.
            self._job.take_unread_weights()

    read = expect  # units are fetched at their use

    def read_frozen(self) -> set[int]:
        """Reads the frozen weights that servers keep and this process copies. Returns their places in the job."""
        self._home.let_go_of(self._frozen)
        self._fetcher.read_frozen(self._frozen)
        return {member.kept.index for member in self._frozen if member.kept is not None}

    def meet(self) -> None:
        # Ranks may wait for each other in another way only once all have used the units that they want.
        if self._fetcher.rounds is not None:
            self._fetcher.rounds.meet()

    def settle(self) -> None:
        """Keeps the job's last weights in the host's memory at its end, so that the model stays usable."""
        members = [*self._members.values(), *self._frozen]
        try:
            self._home.give_up_all()
            # After an exception on this rank nothing is gathered, since other ranks may not come to a gather.
            if sys.exception() is None:
                self._fetcher.gather_all(members)
            self._fetcher.keep_all(members)
        finally:
            self.release()
            self._fetcher.close()

    def give_up(self) -> None:
        """Drops the current step's weights before the job is joined again."""
        self._home.renew(are_same=True)

    def abandon(self) -> None:
        """Gives a model that outlives its optimizer the newest trained weights, if servers can send them. Frozen weights stay on the
        servers, where no step changes them."""
        # Garbage collection may call this method anywhere, even under a lock. So the method waits for no rank and for
        # no thread of the package.
        with contextlib.suppress(LongshoreError):
            self._fetcher.keep_all([*self._members.values()])
        self.release()
        self._fetcher.retire()


def shard(
    model: nn.Module,
    optimizer: Stepping,
    budget: int | str | None = None,
    units: Sequence[Named] | Named | None = None,
    device: torch.device | str | None = None,
    weights: str | None = None,
) -> Sharded:
    """Cuts a model into units, whose weights are resident when they are used, within the budget.

    The model is used as before. A unit's weights are fetched before its forward and before its backward, in the version that the step
    computes with. Other units are released when the budget is full. Frozen weights come from copies in the host's memory. With
    ``frozen="keep"`` each of several gathering ranks has its part there.

    Args:
        model: the model, whole, with its weights.
        optimizer: of this package, with ``streaming=True``, of parameters of the model. Its job is opened.
        budget: bytes for weights and gradients (``"6GiB"``, ``"500MB"`` or a number). By default half of the device's free
            memory; on a CPU it must be given.
        units: the modules that are units: names (``"layers.*"``), classes or modules. By default they are found.
        device: where the model trains, if it is elsewhere now and does not fit there whole.
        weights: how several ranks get a unit. ``"whole"``: each pulls all of it, and none waits for another. ``"gathered"``: each
            pulls its part, and they gather the others' with torch.distributed, in the same order on all ranks. The default is gathered
            where ranks reduce gradients among themselves (``partition="reduce-scatter"``), and whole elsewhere.

    Returns:
        The model's units, with counters of their bytes.

    Raises:
        InvalidError: if a unit does not fit into the budget, ``units`` names no possible unit, or gathering ranks differ in their units.
        UsageError: for a model in units already, an unusable optimizer, or a weight written since the job was opened.
    """
    _check(model, optimizer)
    optimizer.watch(model)
    is_gathered = _is_gathered(weights, optimizer)
    was_open = optimizer._connection is not None
    connection = optimizer._opened()
    connection.weights.settle()
    # A job opened by this call needs no check.
    check = connection.check_written if was_open else lambda: None
    if is_gathered:
        collectives.together(check)
    else:
        check()
    members = _model.members(model, connection.params, connection.frozen())
    target = _target(members, device)
    whole = _budget(budget, target)
    rounds = None
    if is_gathered:
        rounds = Rounds(target)
        whole = rounds.least(whole) if budget is None else whole
    resting = sum(p.numel() * p.element_size() for p in model.parameters()) - sum(member.nbytes for member in members)
    # Autograd holds one module's part of a tied weight's gradient until it can add the other modules' parts.
    tied = sum(member.nbytes for member in members if member.is_trained and len(member.owners) > 1)
    # Ranks that reduce hold two buckets at a time: one that is being filled, and one that is being reduced.
    buckets = 0 if connection.ranks is None else 2 * connection.ranks.bucket_bytes()
    room = None if whole is None else whole - resting - tied - buckets
    named = [units] if isinstance(units, (str, type, nn.Module)) else units
    # On a device two units have gradients at a time: one's are being copied to the host while another's are made.
    is_on_device = _device.accelerator.has(members[0].tensor) if device is None else target.type != "cpu"
    copies = 2 if is_on_device else 1
    cut = _cut(is_gathered, lambda: _model.cut(model, members, named, room, copies), room)
    reserve = max((unit.gradient_bytes for unit in cut), default=0)
    if whole is not None and optimizer._stream is not None:
        trained = [frozenset(member.param.index for member in unit.members if member.param is not None) for unit in cut]
        optimizer._stream.keep_within(reserve, trained)
    room = None if room is None else room - copies * reserve
    _refuse_wrappers()
    fetcher = _fetcher(optimizer, connection, members, rounds, is_on_device)
    _take_written(fetcher, was_open)
    _place(model, members, device)
    if connection.ranks is not None:
        connection.ranks.forget_weights()
    home = Residency(cut, fetcher, room)
    home.saving = saving = Saving(home)
    home.begin()
    ModuleHooks(model, home, saving)
    for owner in {id(owner): owner for member in members for owner, _ in member.owners}.values():
        owner.register_state_dict_post_hook(_copies)
    optimizer._units = UnitWeights(home, fetcher, connection.job)
    connection.put_in_units(optimizer._units)
    connection.job.pull_in_units()
    connection.job.take_unread_weights()  # the fetcher pulls weights itself, so nothing counts as unread
    return Sharded(home, fetcher, whole, resting)


def _check(model: nn.Module, optimizer: Any) -> None:
    if not isinstance(optimizer, Stepping):
        raise invalid("optimizer", type(optimizer).__name__, "one of this package", "use longshore.AdamW or another", UsageError)
    for name, tensor in model.named_parameters():
        if isinstance(tensor, UnitParameter) and not tensors.is_built(tensor):
            unit = tensor._longshore_member.unit.name  # type: ignore[attr-defined]
            raise invalid(name, f"in unit {unit} already", "in one unit", "call shard() once for a model", UsageError)
    options = optimizer._options
    if not options.streaming:
        remedy = "build the optimizer with streaming=True: gradients must leave while backward runs"
        raise invalid("streaming", False, "True with shard()", remedy, UsageError)
    for name, tensor in model.named_parameters():
        if params.is_sharded(tensor):
            remedy = "leave fully_shard out: pass partition='reduce-scatter' to the optimizer, and weights='gathered' here"
            raise invalid(name, "sharded (DTensor)", "whole with shard()", remedy, UsageError)


def _budget(given: int | str | None, target: torch.device) -> int | None:
    if given is not None:
        return _model.budget(given)
    if target.type == "cpu":
        raise invalid("budget", None, "given on a CPU", "say how many bytes weights and gradients may take")
    free, _ = torch.accelerator.get_memory_info(target)
    return int(free) // 2


def _target(members: list[Member], device: torch.device | str | None) -> torch.device:
    """Returns the one device on which the model trains. Autograd has a thread for each device, and units are pinned for
    the nodes of one thread only."""
    if device is not None:
        return torch.device(device)
    first = members[0].tensor
    for member in members:
        found = member.tensor
        if (found.device, _device.accelerator.has(found)) != (first.device, _device.accelerator.has(first)):
            limit = f"on {first.device}, as {members[0].name}"
            remedy = "pass device=, or train a model of several devices without shard()"
            raise invalid(member.name, f"on {found.device}", limit, remedy, UsageError)
    return first.device


def _is_gathered(weights: str | None, optimizer: Stepping) -> bool:
    """Returns whether ranks gather units from each other."""
    _, world_size = optimizer._options.place()
    if weights not in (None, "whole", "gathered"):
        raise invalid("weights", repr(weights), "'whole' or 'gathered'", "choose one of them")
    if world_size == 1:
        return False
    if weights is None:
        # By default ranks gather if they reduce, since they wait for each other then anyway. Without a partition the
        # servers sum, and ranks may have no process group.
        return optimizer._options.partition is not None
    if weights == "gathered" and not collectives.can_meet(world_size):
        remedy = "call torch.distributed.init_process_group() before shard(), or pass weights='whole'"
        raise invalid("weights", "'gathered'", f"'whole' without a process group of all {world_size} ranks", remedy, UsageError)
    return weights == "gathered"


def _cut(is_gathered: bool, act: Callable[[], list[Unit]], room: int | None) -> list[Unit]:
    """Returns the model's units. Gathering ranks must have the same ones; if they differ, or one rank fails, all ranks raise."""
    units: list[Unit] = []

    def described() -> list[tuple[str, Any]]:
        units.extend(act())
        return [("budget", room), *((f"unit {unit.name}", f"{len(unit.members)} weights of {unit.nbytes} bytes") for unit in units)]

    if not is_gathered:
        described()
        return units
    everyones = collectives.together(described)
    for rank, theirs in enumerate(everyones):
        for (name, ours), (other, its) in itertools.zip_longest(everyones[0], theirs, fillvalue=("no unit", None)):
            if (name, ours) != (other, its):
                remedy = "give all ranks the same model, budget= and units="
                raise invalid(other, f"{its} on rank {rank}", f"{name} of {ours}, as on rank 0", remedy)
    return units


def _fetcher(
    optimizer: Stepping, connection: Connection, members: list[Member], rounds: Rounds | None, is_on_device: bool
) -> Fetcher:
    is_gone = functools.partial(_is_overwritten, weakref.ref(optimizer)) if optimizer._options.delay else lambda _: False
    # Lent memory must be copied before a step's last gradient leaves. Ranks that reduce or gather end a step in
    # collectives of their own, so they use none.
    is_alone = rounds is None and connection.ranks is None
    lending = Lending(connection.job, connection.image_dtype) if is_alone and is_on_device else None
    return Fetcher(connection.job, connection.version, members, is_gone, _spans(connection), rounds, lending=lending)


def _take_written(fetcher: Fetcher, was_open: bool) -> None:
    """Keeps a whole copy of each frozen weight that was written since the job was opened. Forward must use the written weights, which
    servers do not have. Weights written later are kept likewise."""
    if fetcher.rounds is not None:
        # A rank notices writes only to its own part, so ranks exchange the names. Each then keeps the written weights
        # whole, and pulls none of them.
        names = collectives.together(lambda: fetcher.written() if was_open else [])
        fetcher.copies.take_all_of(itertools.chain(*names))


def _spans(connection: Connection) -> Spans:
    if connection.ranks is None:
        return in_one_piece
    pieces = connection.ranks.layout.of_params()
    return lambda param, start, elements: partitions.spans(pieces[param.index], start, elements)


def _is_overwritten(optimizer: "weakref.ref[Stepping]", member: Member) -> bool:
    """Returns whether servers may have overwritten a member's weights. A delayed job's servers do so once a step has all gradients of a
    shard."""
    if member.param is None:
        return False
    # The stream is looked up at each call, since a job that is joined again has another one.
    found = optimizer()
    return found is None or found._stream is None or found._stream.has_left(member.param)


#: Wrappers of modules that are refused, by the class's name: an import of FullyShardedDataParallel takes a second.
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}


@functools.cache
def _refuse_wrappers() -> None:
    """Refuses to wrap a model in units from now on: in C++, unseen by Python, torch would read released weights and crash."""
    register_module_module_registration_hook(_refuse)


def _refuse(wrapper: nn.Module, name: str, model: nn.Module | None) -> None:
    if name != "module" or model is None or _WRAPPERS.isdisjoint(kind.__name__ for kind in type(wrapper).__mro__):
        return
    if any(isinstance(parameter, UnitParameter) for parameter in model.parameters()):
        raise UsageError(
            f"{type(wrapper).__name__} cannot wrap a model in units, as longshore.shard makes them: leave the model unwrapped, since the "
            "servers sum the gradients of ranks; give Hugging Face's Trainer a longshore.huggingface.Callback, which sees to it"
        )


def _place(model: nn.Module, members: list[Member], device: torch.device | str | None) -> None:
    """Moves the model to a device, parameter by parameter, and gives each parameter a storage of its own."""
    of_units = {id(member.tensor) for member in members}
    with torch.no_grad():
        for member in members:
            was_built = tensors.is_built(member.tensor)
            tensors.show(member.tensor)
            if device is not None and member.tensor.device != torch.device(device):
                member.tensor.data = torch.empty_like(member.tensor, device=device)
            if not was_built:
                _model.own_memory(member)
            member.tensor.untyped_storage().resize_(0)
        if device is not None:
            for tensor in [*model.parameters(), *model.buffers()]:
                if id(tensor) not in of_units:
                    tensor.data = tensor.data.to(device)


def _copies(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replaces unit weights in a state dict by copies in the host's memory: resident weights are released later."""
    for name in module._parameters:
        value = state.get(prefix + name)
        if isinstance(value, UnitTensor):
            state[prefix + name] = tensors.copy_of(value)
