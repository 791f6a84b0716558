"""The Trainer's state after a step, kept with the step's commit: counters, logs and random generators."""

import dataclasses
import io
import json
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from longshore.errors import StateError, invalid


def take() -> dict[str, Any]:
    """Returns the states of the random generators of Python, NumPy (if imported), the host and the accelerator."""
    states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.random.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    kind = _accelerator()
    if kind is not None:
        states[kind] = torch.get_device_module(kind).get_rng_state()
    return states


def put(states: dict[str, Any]) -> None:
    """Restores the generators from :func:`take`."""
    random.setstate(states["python"])
    torch.random.set_rng_state(states["cpu"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(of_numpy(states["numpy"]))
    kind = _accelerator()
    if kind is not None and kind in states:
        torch.get_device_module(kind).set_rng_state(states[kind])


def of_numpy(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the state in NumPy's own form."""
    name, keys, *rest = state
    return (name, keys.numpy().astype("uint32"), *rest)


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device.type if device is not None else None


_FORMAT = 1
_STATE = "trainer_state.json"
#: Log entries kept with a commit. Earlier ones are in the Trainer's saves.
_LOGS_KEPT = 200
#: Name of the Trainer's folder of a save.
_FOLDER = re.compile(r"checkpoint-(\d+)")
#: Attribute that marks a scheduler whose loaded state lacks the last step of the scheduler.
BEHIND = "_longshore_behind"


@dataclass(frozen=True)
class TrainerData:
    """State of the Trainer, its scheduler and the generators at a step's commit.

    Attributes:
        state: the fields of ``TrainerState`` after the step, with the log entries since the last save.
        scheduler: the scheduler's state before its own step; None without one. is_behind: whether that step is still to be made.
        generators: as :func:`longshore.integrations.trainer_data.take` returns them.
    """

    state: dict[str, Any]
    scheduler: dict[str, Any] | None
    is_behind: bool
    generators: dict[str, Any]

    @classmethod
    def of(cls, state: Any, scheduler: Any, saved_logs: int) -> "TrainerData":
        """Returns the data of a Trainer that is about to make a step."""
        logs = state.log_history[saved_logs:][-_LOGS_KEPT:]
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.name != "log_history"}
        after = {**fields, "global_step": state.global_step + 1, "log_history": logs}
        kept = None if scheduler is None else scheduler.state_dict()
        return cls(after, kept, not isinstance(scheduler, ReduceLROnPlateau), take())

    @property
    def global_step(self) -> int:
        return self.state["global_step"]

    def encode(self) -> bytes:
        kept = {
            "format": _FORMAT,
            "state": json.dumps(self.state),
            "scheduler": self.scheduler,
            "is_behind": self.is_behind,
            "generators": self.generators,
        }
        buffer = io.BytesIO()
        torch.save(kept, buffer)
        return buffer.getvalue()

    @classmethod
    def decode(cls, data: bytes) -> "TrainerData":
        """Decodes another process's data, of plain containers and tensors alone.

        Raises:
            StateError: for the data of another program.
        """
        try:
            kept = torch.load(io.BytesIO(data), weights_only=True)
            if kept["format"] != _FORMAT:
                raise ValueError(f"format {kept['format']}")
            return cls(json.loads(kept["state"]), kept["scheduler"], kept["is_behind"], kept["generators"])
        except Exception as error:
            raise invalid(
                "the job's resume data",
                f"{len(data)} bytes that cannot be read ({error})",
                f"those of longshore.huggingface.Callback in format {_FORMAT}",
                "resume with the program that trained the job, or give the optimizer another job=",
                StateError,
            ) from error

    def write(self, folder: Path, before: Path | None, world_size: int) -> None:
        """Writes the Trainer's files except model and optimizer. ``before`` is its last saved folder."""
        earlier = json.loads((before / _STATE).read_text())["log_history"] if before is not None else []
        state = {**self.state, "log_history": earlier + self.state["log_history"]}
        (folder / _STATE).write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
        if self.scheduler is not None:
            behind = {BEHIND: True} if self.is_behind else {}
            torch.save({**self.scheduler, **behind}, folder / "scheduler.pt")
        generators = dict(self.generators)
        generators["numpy"] = of_numpy(generators["numpy"])
        torch.save(generators, folder / ("rng_state.pth" if world_size <= 1 else "rng_state_0.pth"))


def last_whole(output: Path) -> Path | None:
    """Returns the Trainer's newest complete folder; None without one. The Trainer writes folders in place, with the state's file last."""
    saved = [(int(found[1]), path) for path in output.glob("checkpoint-*") if (found := _FOLDER.fullmatch(path.name))]
    for _, path in sorted(saved, reverse=True):
        try:
            json.loads((path / _STATE).read_text())
        except (OSError, ValueError):
            continue
        return path
    return None
