"""``longshore import`` fills a job with what torch and DeepSpeed have saved, and ``longshore export`` writes it for torch: without a
model, and to the bit."""

import pathlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Mlp, distance
from safetensors.torch import load_file, save_file
from test_checkpoints_of_others import write_universal
from test_from_torch import check_same_state, step
from torch import nn

import longshore

ARGUMENTS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
STEPS = 5
#: The parameter that got no gradient in the first two steps, by its number and its name.
LATE, LATE_NAME = 1, "layers.0.bias"


def trained() -> tuple[Mlp, torch.optim.AdamW]:
    """A model after some steps of torch, one of whose parameters has missed two."""
    torch.manual_seed(3)
    model = Mlp(width=300)
    optimizer = torch.optim.AdamW(model.named_parameters(), **ARGUMENTS)
    for number in range(STEPS):
        optimizer.zero_grad()
        model.loss(number).backward()
        if number < 2:
            model.get_parameter(LATE_NAME).grad = None
        optimizer.step()
    return model, optimizer


def opened(servers: str, job: str) -> tuple[Mlp, longshore.AdamW]:
    torch.manual_seed(4)
    model = Mlp(width=300)
    return model, longshore.AdamW(model.named_parameters(), **ARGUMENTS, servers=servers, job=job, shard_elements=65536)


@pytest.fixture
def known(two_servers: str) -> str:
    """Servers with a job of this model, which new ones are like."""
    model, optimizer = opened(two_servers, "known")
    step(model, optimizer, 0)
    optimizer.close()
    return two_servers


def run(servers: str, *flags: str, job: str = "new") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longshore", "import", "--servers", servers, "--job", job, "--like", "known", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def as_torch(folder: pathlib.Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    save_file({name: value.detach().clone() for name, value in model.named_parameters()}, folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "adamw.pt")
    return ["--from", str(folder), "--optimizer", str(folder / "adamw.pt")]


def as_checkpoint(folder: pathlib.Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """As training loops write it: all in one file, with what is no weight."""
    content = {"epoch": 3, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "args": pathlib.PurePosixPath("x")}
    torch.save(content, folder / "last.pt")
    return ["--from", str(folder / "last.pt"), "--optimizer", str(folder / "last.pt")]


def as_universal(folder: pathlib.Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    write_universal(folder / "step5", model, optimizer)
    (folder / "latest_universal").write_text("step5")
    return ["--from", str(folder)]


@pytest.mark.parametrize("write", [as_torch, as_checkpoint, as_universal])
def test_state_is_imported_and_training_goes_on(tmp_path: pathlib.Path, known: str, write: Callable[..., list[str]]) -> None:
    theirs, plain = trained()
    done = run(known, *write(tmp_path, theirs, plain))
    assert done.returncode == 0, done.stderr
    assert f"and their state after {STEPS} updates" in done.stdout
    ours, optimizer = opened(known, "new")
    check_same_state(optimizer.state_dict(full=True), plain.state_dict())
    assert distance(ours, theirs) == 0
    for number in range(STEPS, 20):
        step(ours, optimizer, number)
        step(theirs, plain, number)
    assert distance(ours, theirs) < 1e-6
    counts = [float(state["step"]) for state in optimizer.state_dict(full=True)["state"].values()]
    assert (counts[0], counts[LATE]) == (20, 18)
    again = run(known, "--from", str(tmp_path))
    assert again.returncode == 1 and "job is new, which has its weights" in again.stderr


def test_what_this_package_saves_is_imported(tmp_path: pathlib.Path, known: str) -> None:
    """Its files have holes where torch writes values at once, and no checksums of them."""
    theirs, plain = trained()
    source = longshore.AdamW(theirs.named_parameters(), **ARGUMENTS)
    source.load_state_dict(plain.state_dict())
    longshore.checkpoint.save_torch(source, tmp_path / "adamw.pt")
    longshore.checkpoint.save_safetensors(source, tmp_path / "model", dtype="fp32")
    done = run(known, "--from", str(tmp_path / "model"), "--optimizer", str(tmp_path / "adamw.pt"))
    assert done.returncode == 0, done.stderr
    _, optimizer = opened(known, "new")
    check_same_state(optimizer.state_dict(full=True), plain.state_dict())


def spoil_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[pathlib.Path], None]:
    def write(folder: pathlib.Path) -> None:
        state = torch.load(folder / "adamw.pt", weights_only=True)
        change(state)
        torch.save(state, folder / "adamw.pt")

    return write


SPOILED: dict[str, tuple[Callable[[pathlib.Path], None], str]] = {
    "missing": (spoil_state(lambda s: s["state"].pop(1)), "layers.0.bias is absent in the state, but must be there"),
    "no moment": (spoil_state(lambda s: s["state"][1].pop("exp_avg_sq")), "layers.0.bias.exp_avg_sq is absent"),
    "shape": (spoil_state(lambda s: s["state"][1].update(exp_avg=torch.zeros(3))), "layers.0.bias.exp_avg has shape [3]"),
    "type": (spoil_state(lambda s: s["state"][1].update(exp_avg=torch.zeros(300).long())), "exp_avg is of type LongStorage"),
    "no tensor": (spoil_state(lambda s: s["state"][1].update(exp_avg=[1.0])), "layers.0.bias.exp_avg is no tensor"),
    "not contiguous": (
        spoil_state(lambda s: s["state"][0].update(exp_avg=torch.zeros(16, 300).t())),
        "layers.0.weight.exp_avg: has strides [1, 300], but must be contiguous",
    ),
    "half a step": (spoil_state(lambda s: s["state"][1].update(step=2.5)), "layers.0.bias.step is 2.5, but must be a whole number"),
    "amsgrad": (
        spoil_state(lambda s: s["state"][1].update(max_exp_avg_sq=torch.zeros(300))),
        "layers.0.bias.max_exp_avg_sq is there, in a job of adamw",
    ),
    "other names": (spoil_state(lambda s: s["param_groups"][0]["param_names"].__setitem__(1, "other")), "other is in the state"),
    "no state": (lambda folder: torch.save({"a": 1}, folder / "adamw.pt"), "has no state of an optimizer"),
    "cut": (lambda folder: (folder / "adamw.pt").write_bytes((folder / "adamw.pt").read_bytes()[:5000]), "it is no file of torch.save"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_state_that_does_not_fit_is_refused_by_name(tmp_path: pathlib.Path, servers: str, what: str) -> None:
    model, optimizer = opened(servers, "known")
    step(model, optimizer, 0)
    flags = as_torch(tmp_path, *trained())
    change, message = SPOILED[what]
    change(tmp_path)
    done = run(servers, *flags)
    assert done.returncode == 1
    assert message in done.stderr, done.stderr


def test_state_without_names_goes_by_the_order_of_one_group(tmp_path: pathlib.Path, known: str) -> None:
    theirs, plain = trained()
    flags = as_torch(tmp_path, theirs, plain)
    spoil_state(lambda s: s["param_groups"][0].pop("param_names"))(tmp_path)
    done = run(known, *flags)
    assert done.returncode == 0, done.stderr
    _, optimizer = opened(known, "new")
    check_same_state(optimizer.state_dict(full=True), plain.state_dict())

    def split(state: dict[str, Any]) -> None:
        group = state["param_groups"][0]
        state["param_groups"].append({**group, "params": group["params"][2:]})
        group["params"] = group["params"][:2]

    spoil_state(split)(tmp_path)
    refused = run(known, *flags, job="other")
    assert refused.returncode == 1
    assert "param_groups is 2 without param_names" in refused.stderr and "named_parameters()" in refused.stderr


def test_nothing_of_a_pickle_runs(tmp_path: pathlib.Path, known: str) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return pathlib.Path.touch, (tmp_path / "touched",)

    theirs, plain = trained()
    flags = as_torch(tmp_path, theirs, plain)
    torch.save({"optimizer": plain.state_dict(), "evil": Evil()}, tmp_path / "adamw.pt")
    done = run(known, *flags)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("rule", ["adamw", "adagrad", "sgd"])
def test_state_is_exported_for_torch_and_comes_back(tmp_path: pathlib.Path, two_servers: str, rule: str) -> None:
    """Without a model and without a trainer: all the way out, on in torch, and in again."""
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "adamw": (longshore.AdamW, torch.optim.AdamW, ARGUMENTS),
        "adagrad": (longshore.Adagrad, torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 1e-3}),
        "sgd": (longshore.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    }
    kind, reference, arguments = kinds[rule]
    torch.manual_seed(5)
    model = Mlp(width=300)
    where = {"servers": two_servers, "job": "known", "shard_elements": 65536}

    def groups(of: nn.Module) -> list[dict[str, Any]]:
        matrices = [(name, value) for name, value in of.named_parameters() if value.ndim > 1]
        return [{"params": matrices}, {"params": [pair for pair in of.named_parameters() if pair[1].ndim == 1], "lr": 1e-4}]

    optimizer = kind(groups(model), **arguments, **where)
    for number in range(6):
        optimizer.zero_grad()
        model.loss(number).backward()
        if number == 3 and rule != "sgd":
            model.get_parameter(LATE_NAME).grad = None
        optimizer.step()
    full = optimizer.state_dict(full=True)
    command = [sys.executable, "-m", "longshore", "export", "--servers", two_servers, "--job", "known", "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, "--optimizer", "--dtype", "f32"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "optimizer.pt" in done.stdout
    assert zipfile.ZipFile(tmp_path / "out" / "optimizer.pt").testzip() is None, "every checksum is right"
    saved = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True, mmap=True)
    beside = ("master",) if rule != "sgd" else ("master", "step")  # torch's SGD counts no steps
    check_same_state(saved, {"state": {n: {k: v for k, v in s.items() if k not in beside} for n, s in full["state"].items()}})
    assert [group["lr"] for group in saved["param_groups"]] == [group["lr"] for group in optimizer.param_groups]
    # torch goes on from it.
    theirs = Mlp(width=300)
    theirs.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    plain = reference(groups(theirs), **arguments)
    plain.load_state_dict(saved)
    for number in range(6, 20):
        step(model, optimizer, number)
        step(theirs, plain, number)
    assert distance(model, theirs) < 1e-5
    # And a new job goes on from where the first one was.
    flags = ["--from", str(tmp_path / "out"), "--optimizer", str(tmp_path / "out" / "optimizer.pt")]
    done = run(two_servers, *flags)
    assert done.returncode == 0, done.stderr
    other = ["export", "--servers", two_servers, "--job", "new", "--out", str(tmp_path / "again"), "--optimizer"]
    again = subprocess.run([sys.executable, "-m", "longshore", *other], capture_output=True, text=True, timeout=120, check=False)
    assert "after the first step" in again.stderr, "version 0 has no hyperparameters"


def contents(folder: pathlib.Path) -> dict[str, Any]:
    """What torch loads from each file, and the text of what is none of its files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    is_torchs = lambda path: path.suffix == ".pt"
    return {str(path.relative_to(folder)): torch.load(path, weights_only=True) if is_torchs(path) else path.read_text() for path in files}


def same(mine: Any, its: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return isinstance(its, torch.Tensor) and mine.dtype == its.dtype and torch.equal(mine, its)
    if isinstance(mine, dict):
        return isinstance(its, dict) and mine.keys() == its.keys() and all(same(mine[key], its[key]) for key in mine)
    if isinstance(mine, list):
        return isinstance(its, list) and len(mine) == len(its) and all(map(same, mine, its))
    return bool(mine == its)


def test_an_export_for_deepspeed_is_what_python_writes(two_servers: str, tmp_path: pathlib.Path) -> None:
    """DeepSpeed itself loads what Python writes, in another test."""
    model, optimizer = opened(two_servers, "known")
    for number in range(3):
        step(model, optimizer, number)
    python, shell = tmp_path / "python", tmp_path / "shell"
    tag = longshore.checkpoint.save_deepspeed(optimizer, python)
    command = [sys.executable, "-m", "longshore", "export", "--servers", two_servers, "--job", "known", "--format", "deepspeed"]

    def export(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120, check=False)

    done = export("--out", str(shell))
    assert done.returncode == 0, done.stderr
    assert tag == "global_step3_universal" and tag in done.stdout and " f32 " in done.stdout, done.stdout
    mine, its = contents(shell), contents(python)
    assert mine.keys() == its.keys()
    for name in mine:
        assert same(mine[name], its[name]), name
    # A new job goes on from it.
    done = run(two_servers, "--from", str(shell))
    assert done.returncode == 0, done.stderr
    wrong = export("--out", str(tmp_path / "wrong"), "--dtype", "bf16")
    assert wrong.returncode == 2 and "--dtype" in wrong.stderr and "safetensors" in wrong.stderr, wrong.stderr
    # DeepSpeed has one step count for all parameters.

    def update(number: int, updated: Callable[[str], bool]) -> None:
        optimizer.zero_grad()
        model.loss(number).backward()
        for name, parameter in model.named_parameters():
            if not updated(name):
                parameter.grad = None
        optimizer.step()

    update(3, lambda name: name != LATE_NAME)
    late = export("--out", str(tmp_path / "late"))
    assert late.returncode == 1 and LATE_NAME in late.stderr and "--optimizer" in late.stderr, late.stderr
    assert not (tmp_path / "late").exists()
    # It has one again once each has missed as many updates as the others.
    update(4, lambda name: name == LATE_NAME)
    longshore.checkpoint.save_deepspeed(optimizer, tmp_path / "even, by python")
    optimizer.close()
    done = export("--out", str(tmp_path / "even"))
    assert done.returncode == 0, done.stderr
    mine, its = contents(tmp_path / "even"), contents(tmp_path / "even, by python")
    assert mine.keys() == its.keys() and all(same(mine[name], its[name]) for name in mine)
    steps = {int(value) for name, value in mine.items() if name.endswith("/step.pt")}
    assert steps == {4}, sorted(mine)
