"""The Hugging Face Trainer's saves: a callback, and the state from which a Trainer resumes at the servers' last step.

The Trainer loads weights into a model before it resumes. A model in units cannot take trained ones, which come from the servers.
:class:`Loaded` notes these weights, and compares them once the servers are at the Trainer's step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerCallback, TrainingArguments
from transformers.training_args import ParallelMode

from longshore.checkpoint import Saving
from longshore.errors import StateError, UsageError, invalid, warn
from longshore.optimizer.parts import unwrapped
from longshore.transfer import params, tensors

if TYPE_CHECKING:
    from longshore.optim import Optimizer


def _generators() -> dict[str, Any]:
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


def _restore(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.random.set_rng_state(states["cpu"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(_of_numpy(states["numpy"]))
    kind = _accelerator()
    if kind is not None and kind in states:
        torch.get_device_module(kind).set_rng_state(states[kind])


def _of_numpy(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the state in NumPy's own form."""
    name, keys, *rest = state
    return (name, keys.numpy().astype("uint32"), *rest)


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device.type if device is not None else None


_FORMAT = 1
_STATE = "trainer_state.json"
#: Number of log entries kept with a commit. Earlier entries are in the Trainer's saves.
_LOGS_KEPT = 200
#: Name of the Trainer's folder of a save.
_FOLDER = re.compile(r"checkpoint-(\d+)")
#: Attribute that marks a scheduler whose loaded state was taken before the scheduler's last step.
BEHIND = "_longshore_behind"


@dataclass(frozen=True)
class TrainerData:
    """State of the Trainer, its scheduler and the generators at a step's commit.

    Attributes:
        state: the fields of ``TrainerState`` after the step, with the log entries since the last save.
        scheduler: the scheduler's state before its own step; None without one. is_behind: whether that step is still to be made.
        generators: of Python, NumPy, the host and the accelerator.
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
        return cls(after, kept, not isinstance(scheduler, ReduceLROnPlateau), _generators())

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
        generators["numpy"] = _of_numpy(generators["numpy"])
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


class Loaded:
    """Digests of the weights loaded into a model's units since this object was built."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        #: Digests of loaded weights, by name.
        self._digests: dict[str, bytes] = {}
        #: Names of weights that this object has taken out of the state being loaded.
        self._left_out: set[str] = set()
        self._handles = [
            model.register_load_state_dict_pre_hook(self._leave_out),
            model.register_load_state_dict_post_hook(self._is_not_missing),
        ]

    def check(self) -> None:
        """Compares loaded weights with the servers'. Later loads are refused.

        Raises:
            UsageError: naming a parameter whose weights differ.
        """
        for handle in self._handles:
            handle.remove()
        for name, parameter in self._in_units():
            if name in self._digests and _digest(tensors.copy_of(parameter)) != self._digests[name]:
                raise invalid(
                    name,
                    "another on the servers than what was loaded into the model",
                    "the same",
                    "its weights are the servers', so resume from a folder that was saved by this job; to start from other weights, load "
                    "them before shard() and give the optimizer another job=",
                    UsageError,
                )
        self._digests.clear()

    def _in_units(self) -> Iterator[tuple[str, Any]]:
        """Yields trained parameters in units, under each of their names."""
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if isinstance(parameter, tensors.UnitParameter) and parameter._longshore_member.is_trained:  # type: ignore[attr-defined]
                yield name, parameter

    def _leave_out(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self._left_out.clear()
        for name, parameter in self._in_units():
            value = state.get(prefix + name)
            # A value of another shape stays in ``state``, so that torch refuses it by name.
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                self._digests[name] = _digest(value.to(parameter.dtype))
                self._left_out.add(prefix + name)
                del state[prefix + name]

    def _is_not_missing(self, module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in self._left_out]


def is_in_units(model: Any) -> bool:
    """Returns whether :func:`longshore.shard` cut the model."""
    return isinstance(model, nn.Module) and any(isinstance(p, tensors.UnitParameter) for p in model.parameters())


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().to("cpu").contiguous().resolve_neg().reshape(-1).view(torch.uint8)
    content: Any = flat.numpy()
    return hashlib.blake2b(content).digest()


class Callback(TrainerCallback):
    """Brings the newest weights to evaluations and saves, and has the servers write a checkpoint at each of the Trainer's saves. Logs the
    servers' reports, and keeps with each step the state from which :func:`newest` resumes.

    Evaluations restore the random generators, so that a resumed run has the dropout of an uninterrupted one.

    Args:
        checkpoint: whether the servers write a checkpoint at each of the Trainer's saves, for ``resume_from_checkpoint``. Servers need a
            folder for it (``--checkpoint-dir``). Without one None warns and True raises.
    """

    def __init__(self, *, checkpoint: bool | None = None) -> None:
        self._saving = Saving(checkpoint)
        #: True if the callback existed when the Trainer was built, so that the job has the model's names.
        self._was_there = False
        self._generators: dict[str, Any] | None = None
        self._resumed: bytes | None = None
        self._saved_logs = 0
        self._loaded: Loaded | None = None
        #: Notes the best model's weights, which the Trainer loads into a model in units at the end of training.
        self._best: Loaded | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._was_there = True
        if model is not None:
            # The Trainer builds its optimizer later, without names.
            params.learn_names(model.named_parameters())
        if is_in_units(model):
            self._loaded = Loaded(model)
            _leave_unwrapped(model, args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer, scheduler = unwrapped(kwargs.get("optimizer")), kwargs.get("lr_scheduler")
        if optimizer is None:
            return
        if (model := kwargs.get("model")) is not None:
            optimizer.watch(model)
        optimizer.open()
        self._warn_of_places(optimizer)
        self._saving.begin(optimizer)
        self._check_resumed(optimizer, state)
        if self._loaded is not None:
            self._loaded.check()
            self._loaded = None
        if args.load_best_model_at_end and is_in_units(kwargs.get("model")):
            self._check_best(args, optimizer)
            self._best = Loaded(kwargs["model"])
        if scheduler is not None and getattr(scheduler, BEHIND, False):
            # The resumed state was committed before the scheduler's own step, which is made now.
            delattr(scheduler, BEHIND)
            scheduler.step()
        self._saved_logs = len(state.log_history)
        optimizer.resume_data = lambda: TrainerData.of(state, scheduler, self._saved_logs).encode()

    def _warn_of_places(self, optimizer: Optimizer) -> None:
        """Warns that the job has places instead of the parameters' names. Names learnt now would be too late: on a
        resume the next process looks for the job with places again."""
        if not self._was_there and optimizer.is_named_by_place:
            self._was_there = True
            warn(
                f"the callback was added after the Trainer was built, so the parameters of job {optimizer.job} are named by their places "
                "(group0.param0), on the status page and in exports too: pass callbacks=[longshore.huggingface.Callback()] to the Trainer"
            )

    def _check_best(self, args: Any, optimizer: Optimizer) -> None:
        """Refuses to train for hours towards a best model to which no server can return."""
        if args.save_only_model or not self._saving.writes(optimizer):
            raise invalid(
                "load_best_model_at_end",
                True,
                "False in stage 3, where a save has no checkpoint of the servers, which have the weights",
                "start servers with --checkpoint-dir and leave save_only_model and Callback(checkpoint=False) out, or leave it out and load "
                "the best folder into another model",
                UsageError,
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        best, self._best = self._best, None
        optimizer = unwrapped(kwargs.get("optimizer"))
        if best is None or optimizer is None:
            return
        if state.best_model_checkpoint is not None:
            # The servers return to the version of the best model's save.
            path = Path(state.best_model_checkpoint) / "optimizer.pt"
            optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        best.check()

    def _check_resumed(self, optimizer: Optimizer, state: Any) -> None:
        """Refuses to start at another step than the servers', which would repeat steps with the weights of later
        ones."""
        found, self._resumed = optimizer.resumed, self._resumed
        if not found or found == self._resumed:
            return
        self._resumed = found
        step = TrainerData.decode(found).global_step
        if step != state.global_step:
            raise UsageError(
                f"job {optimizer.job} is at step {step} on its servers, and the Trainer starts at step {state.global_step}: pass "
                "resume_from_checkpoint=longshore.huggingface.newest(trainer) to train(), which goes on there; True, which goes "
                "back to the last save; or give the optimizer another job="
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = unwrapped(kwargs.get("optimizer"))
        if optimizer is None:
            return
        if control.should_evaluate or control.should_training_stop:
            optimizer.flush()
        if control.should_evaluate:
            self._generators = _generators()
        if control.should_save:
            self._saving.save(optimizer, state.global_step)

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._generators is not None:
            _restore(self._generators)
            self._generators = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = unwrapped(kwargs.get("optimizer"))
        if optimizer is not None:
            # on_step_end does not know of some saves, for example of the best model.
            self._saving.save(optimizer, state.global_step)
            self._saved_logs = len(state.log_history)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        optimizer = unwrapped(kwargs.get("optimizer"))
        if logs is None or optimizer is None or optimizer.last_report is None or "loss" not in logs:
            return
        report = optimizer.last_report
        optimizer.report_loss(logs["loss"])
        logs["exposed_ms"] = round(report.exposed_s * 1e3, 3)
        logs["server_grad_norm"] = report.grad_norm
        logs["loss_scale"] = report.loss_scale
        if optimizer.accumulates[0]:
            # The Trainer finds no gradients in ``.grad``, and logs a norm of 0.
            logs["grad_norm"] = state.log_history[-1]["grad_norm"] = report.grad_norm


def _leave_unwrapped(model: torch.nn.Module, args: TrainingArguments) -> None:
    """Makes Accelerate take a model in units unchanged, instead of moving it and wrapping it in
    DistributedDataParallel.

    The servers sum the gradients of ranks. Accelerate's other task is done here: with ``bf16`` or ``fp16`` forward runs under autocast.
    """
    if args.parallel_mode is not ParallelMode.DISTRIBUTED or getattr(model, "_is_accelerate_prepared", False):
        return
    model._is_accelerate_prepared = True  # type: ignore[assignment]
    if args.bf16 or args.fp16:
        casts = torch.autocast(args.device.type, torch.bfloat16 if args.bf16 else torch.float16)
        model.forward = convert_outputs_to_fp32(casts(model.forward))
