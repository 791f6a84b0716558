"""Models of equal blocks, and an accountant of the memory of parameters and gradients."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import longshore

STEPS = 4
#: Transports of weights: fetched ahead of their use, or copied from a server's memory at their use.
TRANSPORTS = "tcp", "memfd"


def optimizer_of(model: nn.Module, **options: Any) -> longshore.AdamW:
    """Returns an optimizer that fetches weights ahead of their use, as over a network, unless another transport is named."""
    return longshore.AdamW(model.named_parameters(), **{"lr": 1e-2, "streaming": True, "transport": "tcp", **options})


def train(model: nn.Module, optimizer: longshore.AdamW, steps: int = STEPS, micro_steps: int = 1, first: int = 0) -> None:
    for step in range(first, first + steps):
        for micro_step in range(micro_steps):
            (model.loss(step * micro_steps + micro_step) / micro_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


def in_units(model: nn.Module, part: int = 8, **options: Any) -> tuple[longshore.AdamW, longshore.Sharded]:
    """Returns an optimizer of a model, and the model in units. The budget is the model's weights divided by ``part``."""
    optimizer = optimizer_of(model, **options)
    return optimizer, longshore.shard(model, optimizer, weight_bytes(model) // part)


class Deep(nn.Module):
    """Many equal layers on random vectors."""

    def __init__(self, depth: int = 32, width: int = 48, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.to(dtype)
        self.dtype = dtype

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + functional.gelu(layer(hidden))
        return hidden

    def inputs(self, step: int) -> Tensor:
        width = self.layers[0].in_features
        return torch.randn(4, width, generator=torch.Generator().manual_seed(step)).to(self.dtype)

    def loss(self, step: int) -> Tensor:
        return self(self.inputs(step)).float().square().mean()


class Recomputing(Deep):
    """Recomputes each layer in backward."""

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + functional.gelu(checkpoint(layer, hidden, use_reentrant=False))
        return hidden


class Lora(nn.Module):
    """A frozen layer with trained layers of lower rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.in_features = base.in_features
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


def weight_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


class Accountant(TorchDispatchMode):
    """Adds up the memory of a model's parameters and gradients: after each operation of torch, and after each accumulated gradient. Made
    before the optimizer, so that it sees gradients before they leave."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = list(model.parameters())
        #: Gradients that something still refers to.
        self._made: list[weakref.ref[Tensor]] = []
        #: Storages of the parameters by identity, set when the block begins. Tied parameters share one.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.most = self.gradients = 0
        for parameter in self.parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: Tensor) -> None:
        self.gradients += 1
        assert parameter.grad is not None
        self._made.append(weakref.ref(parameter.grad))
        self._count()

    def _count(self) -> None:
        self._made = [made for made in self._made if made() is not None]
        with torch._C.DisableTorchFunctionSubclass():
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            gradients += [tensor for made in self._made if (tensor := made()) is not None]
            held = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in gradients}
        self.most = max(self.most, sum(held.values()) + sum(storage.nbytes() for storage in self._storages.values()))

    def __enter__(self) -> "Accountant":
        # A storage may change its size, but in training no parameter gets another storage.
        self._storages = self._find_storages()
        super().__enter__()
        return self

    def _find_storages(self) -> dict[int, torch.UntypedStorage]:
        with torch._C.DisableTorchFunctionSubclass():
            storages = [parameter.untyped_storage() for parameter in self.parameters]
        return {storage._cdata: storage for storage in storages}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:  # a view allocates nothing, and the operation that reads it is counted
            self._count()
        return result

    def check(self, budget: int) -> None:
        """Checks that weights and gradients stayed within the budget, and that gradients were seen."""
        assert self.gradients > 0
        assert self._find_storages().keys() == self._storages.keys()
        assert self.most <= budget, f"{self.most} bytes of weights and gradients, budget {budget}"


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def same(first: nn.Module, second: nn.Module) -> None:
    """Checks that both have the same weights, bit for bit, on any device."""
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    differ = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not differ, differ


def check_in_units(
    whole: nn.Module, cut: nn.Module, share: float = 1 / 8, *, budget: int | None = None, micro_steps: int = 1, **options: Any
) -> longshore.Sharded:
    """Trains both, the second in units within a budget: this share of its weights, unless it is given in bytes. Checks that both then have
    the same weights, and that the budget sufficed."""
    plain = optimizer_of(whole, **options)
    train(whole, plain, micro_steps=micro_steps)
    accountant = Accountant(cut)
    optimizer = optimizer_of(cut, **options)
    budget = int(weight_bytes(cut) * share) if budget is None else budget
    sharded = longshore.shard(cut, optimizer, budget)
    with accountant:
        train(cut, optimizer, micro_steps=micro_steps)
    accountant.check(budget)
    same(whole, cut)
    # The models keep their optimizers, since weights come from the optimizers' jobs.
    whole.optimizer, cut.optimizer, cut.most = plain, optimizer, accountant.most
    return sharded
