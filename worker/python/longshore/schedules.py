"""DeepSpeed's learning rate schedules under torch's interface, with the same numbers. The first step has the rate of 0 steps."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from longshore.errors import invalid

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]


class _Schedule(LRScheduler):
    """Each group's rate as a function of the steps made so far."""

    def _rate(self, steps: int, group: int) -> float:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "_warmth"}

    def get_lr(self) -> list[float | Tensor]:
        return [self._rate(self.last_epoch, group) for group in range(len(self.optimizer.param_groups))]


def _of_groups(name: str, value: Any, groups: int) -> list[float]:
    """Returns a number for each group, from one for all or one for each."""
    if not isinstance(value, (list, tuple)):
        return [float(value)] * groups
    if len(value) != groups:
        raise invalid(f"scheduler.params.{name}", list(value), f"one number, or {groups}", "give one for each param group")
    return [float(one) for one in value]


def _warmth(kind: str, steps: int) -> Callable[[int], float]:
    """Returns a function of the steps made: the progress of the warm-up, from 0 to 1. The warm-up has at least 2 steps,
    and is at 0 once the first step is made."""
    if kind not in ("log", "linear"):
        raise invalid("scheduler.params.warmup_type", kind, "log or linear", "choose one of them")
    if steps < 1:
        raise invalid("scheduler.params.warmup_num_steps", steps, "at least 1", "leave the scheduler out for no warm-up")
    steps = max(2, steps)

    def warmth(made: int) -> float:
        before = made - 1
        if before >= steps:
            return 1.0
        return math.log(before + 1) / math.log(steps) if kind == "log" else before / steps

    return warmth


class WarmupLR(_Schedule):
    """Warms up from ``warmup_min_lr`` to ``warmup_max_lr``, and stays constant. Without the latter the target is the optimizer's own
    rate."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        groups = optimizer.param_groups
        most = [group["lr"] for group in groups][:1] * len(groups) if warmup_max_lr is None else warmup_max_lr
        self.warmup_num_steps = max(2, warmup_num_steps)
        self._least = _of_groups("warmup_min_lr", warmup_min_lr, len(groups))
        self._most = _of_groups("warmup_max_lr", most, len(groups))
        self._warmth = _warmth(warmup_type, warmup_num_steps)
        super().__init__(optimizer)

    def _part(self, steps: int) -> float:
        return self._warmth(steps)

    def _rate(self, steps: int, group: int) -> float:
        least, most = self._least[group], self._most[group]
        return least if steps == 0 else least + (most - least) * self._part(steps)


class WarmupDecayLR(WarmupLR):
    """Warms up as :class:`WarmupLR`, and falls linearly to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _part(self, steps: int) -> float:
        before = steps - 1
        if before < self.warmup_num_steps:
            return self._warmth(steps)
        return max(0.0, (self.total_num_steps - before) / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Schedule):
    """Warms up from ``warmup_min_ratio`` of the optimizer's own rate to the whole rate. Falls to ``cos_min_ratio`` of it in a cosine."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        self.total_num_steps, self.warmup_num_steps = total_num_steps, max(2, warmup_num_steps)
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self._warmth = _warmth(warmup_type, warmup_num_steps)
        super().__init__(optimizer)

    def _ratio(self, steps: int) -> float:
        if steps == 0:
            return 0.0
        before = steps - 1
        if before < self.warmup_num_steps:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self._warmth(steps)
        done = min(1.0, (before - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps))
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)

    def _rate(self, steps: int, group: int) -> float:
        return float(self.base_lrs[group]) * self._ratio(steps)


class LRRangeTest(_Schedule):
    """Raises the rate from ``lr_range_test_min_lr`` on, to find the largest that trains."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | list[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        self._least = _of_groups("lr_range_test_min_lr", lr_range_test_min_lr, len(optimizer.param_groups))
        self.step_size, self.step_rate, self.is_staircase = (
            lr_range_test_step_size,
            lr_range_test_step_rate,
            lr_range_test_staircase,
        )
        super().__init__(optimizer)

    def _rate(self, steps: int, group: int) -> float:
        interval = steps / self.step_size
        return self._least[group] * (1 + self.step_rate * (math.floor(interval) if self.is_staircase else interval))


class OneCycle(_Schedule):
    """Rises from ``cycle_min_lr`` to ``cycle_max_lr`` and falls again, with Adam's first beta the other way round, and decays
    afterwards."""

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        self.cycle_min_lr, self.cycle_max_lr, self.decay_lr_rate = cycle_min_lr, cycle_max_lr, decay_lr_rate
        self.up = float(cycle_first_step_size)
        self.down = self.up if cycle_second_step_size is None else float(cycle_second_step_size)
        second = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.stairs = (cycle_first_stair_count, second)
        self.decay_step_size = decay_step_size
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        self.cycle_min_mom, self.cycle_max_mom, self.decay_mom_rate = cycle_min_mom, cycle_max_mom, decay_mom_rate
        super().__init__(optimizer)

    def _height(self, steps: int) -> float:
        """Returns the height in the cycle, from 0 to 1."""
        at = steps % (self.up + self.down)
        is_up = at <= self.up
        height = at / self.up if is_up else (self.up + self.down - at) / self.down
        stairs = self.stairs[0 if is_up else 1]
        return math.floor(height * stairs + 1e-9) / stairs if stairs else height

    def _decayed(self, steps: int) -> float | None:
        """Returns the number of past decay intervals; None within the cycle."""
        before = steps - 1
        if before < self.up + self.down:
            return None
        return (before - self.up - self.down + 1) / self.decay_step_size if self.decay_step_size else 0.0

    def _rate(self, steps: int, group: int) -> float:
        decayed = self._decayed(steps)
        if decayed is not None:
            return self.cycle_min_lr / (1 + self.decay_lr_rate * decayed)
        return self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * self._height(steps)

    def _momentum(self, steps: int) -> float:
        decayed = self._decayed(steps)
        if steps == 0:
            return self.cycle_min_mom
        if decayed is not None:
            return self.cycle_max_mom * (1 + self.decay_mom_rate * decayed)
        return self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * self._height(steps)

    def get_lr(self) -> list[float | Tensor]:
        if self.cycle_momentum:
            for group in self.optimizer.param_groups:
                group["betas"] = (self._momentum(self.last_epoch), 0.99)
        return super().get_lr()
