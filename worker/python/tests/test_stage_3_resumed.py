"""A killed run of the Hugging Face Trainer in stage 3 continues as if nothing had happened."""

import pathlib
import shutil
import subprocess

import pytest
import torch
from conftest import ended_after, running
from forked import Forked
from programs import kill_at, random_step
from torch import Tensor
from units import Deep, optimizer_of, same

import longshore
from longshore import errors
from longshore.huggingface import Loaded

STEPS, SAVES = 8, 3
PROGRAM = """
import pathlib
import torch, test_stage_3
torch.set_num_threads(1)
folder = pathlib.Path({folder!r})
model, optimizer, losses = test_stage_3.trained(folder, 3, {servers!r}, {job!r}, None, resume={resume!r}, max_steps=8)
torch.save((losses, model.state_dict()), folder / "end.pt")
optimizer.close()
"""


def start(folder: pathlib.Path, servers: str, job: str, resume: str = "") -> subprocess.Popen[str]:
    program = PROGRAM.format(folder=str(folder), servers=servers, job=job, resume=resume)
    return Forked(program, imports=["trainer"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str], folder: pathlib.Path) -> tuple[dict[int, float], dict[str, Tensor]]:
    """Waits for the process's end. Returns its losses by step, and its last weights."""
    with ended_after(300, process):
        told = process.communicate()[1]
    assert process.returncode == 0, told
    losses, weights = torch.load(folder / "end.pt", weights_only=True)
    return losses, weights


def test_a_killed_trainer_goes_on_where_it_saved_or_where_the_servers_are(tmp_path: pathlib.Path) -> None:
    with running("--checkpoint-dir", str(tmp_path / "checkpoints")) as servers:
        undisturbed, weights = finish(start(tmp_path / "plain", servers, "plain"), tmp_path / "plain")
        assert [*undisturbed] == [*range(1, STEPS + 1)]
        newest, saved = tmp_path / "newest", tmp_path / "saved"
        step = random_step(SAVES + 1, STEPS - 2)
        printed = kill_at(step, start(newest, servers, "killed"))
        assert printed == {at: undisturbed[at] for at in printed}
        shutil.copytree(newest, saved, ignore=shutil.ignore_patterns("partial-*"))

        # No step is repeated. Losses that the dead process computed and did not write are missing.
        losses, ended = finish(start(newest, servers, "killed", "newest"), newest)
        assert set(undisturbed) - set(losses) <= {step, step + 1}
        assert losses == {at: undisturbed[at] for at in losses}
        assert are_equal(ended, weights)

        # The servers have all steps by now, and go back to their checkpoint.
        losses, ended = finish(start(saved, servers, "killed", "save"), saved)
        assert losses == undisturbed
        assert are_equal(ended, weights)


def are_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_what_is_loaded_is_compared_with_what_the_servers_have() -> None:
    models = [Deep(depth=4) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
        longshore.shard(model, optimizer_of(model), "40KB")
    whole, cut, other = models
    loaded = Loaded(cut)
    assert not any(cut.load_state_dict(whole.state_dict()))
    loaded.check()
    same(whole, cut)
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight of unit layers\.0 was changed in place"):
        cut.load_state_dict(whole.state_dict())

    state = {name: value.clone() for name, value in whole.state_dict().items()}
    state["layers.2.bias"][5] += 1
    loaded = Loaded(other)
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.1\.weight"):
        other.load_state_dict({**state, "layers.1.weight": torch.zeros(2, 2)})
    most = {name: value for name, value in state.items() if name != "layers.3.bias"}
    assert other.load_state_dict(most, strict=False).missing_keys == ["layers.3.bias"]
    with pytest.raises(errors.UsageError, match=r"layers\.2\.bias is another on the servers than what was loaded"):
        loaded.check()
    same(whole, other)
