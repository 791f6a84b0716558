"""Jobs filled from other programs' files, and files written for other programs: the contents are equal to the bit."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import distance, pair, step, train
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_from_torch import both, check_same_state, trained
from torch import nn

import longshore
from longshore import checkpoint, errors


def write_universal(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, flat: bool = False) -> None:
    """Writes files as DeepSpeed's ds_to_universal.py does. For ZeRO-3 tensors are flat, and no file has the step."""
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        of_param = folder / "zero" / name
        of_param.mkdir(parents=True)
        for key, value in (("fp32", parameter.detach()), ("exp_avg", state["exp_avg"]), ("exp_avg_sq", state["exp_avg_sq"])):
            torch.save(value.flatten().clone() if flat else {"cat_dim": 0, "param": value.clone()}, of_param / f"{key}.pt")
        if not flat:
            torch.save(state["step"], of_param / "step.pt")


def test_the_step_of_a_universal_checkpoint_has_several_places(tmp_path: Path, two_servers: str) -> None:
    """DeepSpeed's own files are in test_deepspeed_itself.py."""
    ours, theirs, plain = trained(torch.optim.AdamW, width=500)
    write_universal(tmp_path / "in" / "step5", theirs, plain, flat=True)
    (tmp_path / "in" / "latest_universal").write_text("step5")
    options = {"servers": two_servers, "job": "ds", "shard_elements": 65536}
    optimizer = longshore.AdamW(ours.named_parameters(), lr=1e-3, weight_decay=0.01, **options)
    checkpoint.load_deepspeed(optimizer, tmp_path / "in", step=5)
    check_same_state(optimizer.state_dict(full=True), plain.state_dict())
    both(ours, optimizer, theirs, plain, range(5, 15))
    assert distance(ours, theirs) < 1e-6
    tag = checkpoint.save_deepspeed(optimizer, tmp_path / "out")
    assert tag == "global_step15_universal" == (tmp_path / "out" / "latest_universal").read_text()
    folder, full = tmp_path / "out" / tag, optimizer.state_dict(full=True)

    def load() -> None:
        other = longshore.AdamW(pair("mlp", width=500)[0].named_parameters())
        checkpoint.load_deepspeed(other, folder)
        check_same_state(other.state_dict(full=True), full)

    load()
    # The step is found in the parameters' files, in ZeRO-3's file, and in the engine's own counter. The test removes
    # one after the other.
    for place in ("zero/*/step.pt", "zero/optimizer_state.pt"):
        for file in folder.glob(place):
            file.unlink()
        load()
    for file in folder.glob("*_model_states.pt"):
        file.unlink()
    with pytest.raises(errors.StateError, match=r"step is in no file.*pass step="):
        load()
    with pytest.raises(errors.InvalidError, match=r"global_step15_universal is there, and not empty"):
        checkpoint.save_deepspeed(optimizer, tmp_path / "out")


def test_a_parameter_of_a_universal_checkpoint_has_its_own_step_count(tmp_path: Path) -> None:
    ours, theirs, plain = trained(torch.optim.AdamW)
    plain.state_dict()["state"][1]["step"].fill_(3.0)
    write_universal(tmp_path, theirs, plain)
    optimizer = longshore.AdamW(ours.named_parameters())
    checkpoint.load_deepspeed(optimizer, tmp_path)
    check_same_state(optimizer.state_dict(full=True), plain.state_dict())
    both(ours, optimizer, theirs, plain, range(5, 15))
    assert distance(ours, theirs) < 1e-6
    assert [state["step"] for state in optimizer.state_dict(full=True)["state"].values()][:3] == [15, 13, 15]


def test_what_is_no_universal_checkpoint_is_refused(tmp_path: Path) -> None:
    ours, theirs, plain = trained(torch.optim.AdamW)
    with pytest.raises(errors.StateError, match=r"ds_to_universal\.py"):
        checkpoint.load_deepspeed(longshore.AdamW(ours.named_parameters()), tmp_path)
    with pytest.raises(errors.StateError, match=r"optimizer is sgd, but must be adamw or adam"):
        checkpoint.load_deepspeed(longshore.SGD(ours.named_parameters()), tmp_path)
    optimizer = longshore.AdamW(ours.named_parameters())
    write_universal(tmp_path, theirs, plain)
    # Other states that do not fit are in test_from_torch.py.
    other = (tmp_path / "zero" / "layers.0.bias").rename(tmp_path / "zero" / "layers.9.bias")
    with pytest.raises(errors.StateError, match=r"layers\.9\.bias is in .*give the optimizer"):
        checkpoint.load_deepspeed(optimizer, tmp_path)
    shutil.rmtree(other)
    with pytest.raises(errors.StateError, match=r"layers\.0\.bias\.fp32 is absent, but must be in"):
        checkpoint.load_deepspeed(optimizer, tmp_path)
    assert optimizer._filling is None
    step(ours, optimizer)
    save_file({name: value.detach().clone() for name, value in ours.named_parameters()}, tmp_path / "model.safetensors")
    with pytest.raises(errors.StateError, match="new job"):
        checkpoint.load_safetensors(optimizer, tmp_path)


@pytest.mark.parametrize(("kind", "reference"), [(longshore.AdamW, torch.optim.AdamW), (longshore.SGD, torch.optim.SGD)])
def test_torchs_file_is_what_torch_would_have_written(tmp_path: Path, kind: Any, reference: Any) -> None:
    arguments = {"lr": 1e-2} if kind is longshore.AdamW else {"lr": 1e-2, "momentum": 0.9}
    ours, theirs = pair("mlp", width=500)
    optimizer, plain = kind(ours.named_parameters(), **arguments), reference(theirs.named_parameters(), **arguments)
    both(ours, optimizer, theirs, plain, range(5))
    checkpoint.save_torch(optimizer, tmp_path / "state.pt")
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.pt"]
    for mapped in (True, False):
        saved = torch.load(tmp_path / "state.pt", weights_only=True, mmap=mapped)
        assert {number: set(state) for number, state in saved["state"].items()} == {
            number: {key for key, value in state.items() if value is not None} for number, state in plain.state_dict()["state"].items()
        }
        check_same_state(optimizer.state_dict(full=True), saved)
    moved = reference(ours.named_parameters(), lr=1.0)
    moved.load_state_dict(saved)
    optimizer.close()
    both(ours, moved, theirs, plain, range(5, 10))
    assert distance(ours, theirs) < 1e-6
    with pytest.raises(errors.InvalidError, match=r"state\.pt is there, but must be a new file"):
        checkpoint.save_torch(kind(theirs.named_parameters()), tmp_path / "state.pt")


@pytest.mark.parametrize("several", [False, True])
def test_safetensors_give_master_weights_all_their_bits(tmp_path: Path, several: bool) -> None:
    ours, theirs = pair("mlp", width=500)
    ours.to(torch.bfloat16)
    weights = {name: value.detach().clone() for name, value in theirs.named_parameters()}
    if several:
        names = sorted(weights)
        halves = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
        for file, part in halves.items():
            save_file({name: weights[name] for name in part}, tmp_path / file)
        index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        # A tensor of 3 bytes that is no parameter shifts the parameters to odd offsets.
        save_file({**weights, "_buffer": torch.ones(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    torch.nn.init.zeros_(ours.layers[0].weight)
    optimizer = longshore.AdamW(ours.named_parameters())
    checkpoint.load_safetensors(optimizer, tmp_path)
    assert torch.equal(ours.layers[0].weight, weights["layers.0.weight"].bfloat16())
    full = optimizer.state_dict(full=True)
    for number, name in enumerate(weights):
        assert torch.equal(full["state"][number]["master"], weights[name]), name
        assert full["state"][number]["step"] == 0


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    ours, theirs = pair("mlp")
    weights = {name: value.detach().clone() for name, value in theirs.named_parameters()}
    file = tmp_path / "model.safetensors"
    optimizer = longshore.AdamW(ours.named_parameters())
    cases = [
        ({"layers.0.bias": None}, r"layers\.0\.bias is absent, but must be in .*model\.safetensors"),
        ({"layers.0.bias": torch.zeros(7)}, r"layers\.0\.bias is of \[7\], but must be of \[32\]"),
        ({"layers.0.bias": torch.zeros(32).long()}, r"layers\.0\.bias is I64, but must be fp32, bf16 or fp16"),
    ]
    for change, message in cases:
        save_file({name: value for name, value in {**weights, **change}.items() if value is not None}, file)
        with pytest.raises(errors.StateError, match=message):
            checkpoint.load_safetensors(optimizer, file)
    whole = file.read_bytes()
    for broken, message in ((whole[:-5], "too short"), (b"\xff" * 100, "header of"), (whole[:8] + b"x" * (len(whole) - 8), "not readable")):
        file.write_bytes(broken)
        with pytest.raises(errors.StateError, match=message):
            checkpoint.load_safetensors(optimizer, file)
    with pytest.raises(errors.StateError, match=r"path is .*nothing, but must be a safetensors file"):
        checkpoint.load_safetensors(optimizer, tmp_path / "nothing")
    assert optimizer._filling is None


def read_back(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a folder's files, which its index must describe."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"
        found = load_file(file)
        assert {index["weight_map"].pop(name) for name in found} == {file.name}
        tensors.update(found)
    assert not index["weight_map"]
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()) == index["metadata"]["total_size"]
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_safetensors_are_read_by_their_own_library(tmp_path: Path, dtype: torch.dtype, two_servers: str) -> None:
    ours, _ = pair("mlp", width=500)
    ours.layers[2].requires_grad_(False)
    ours.register_buffer("mask", torch.ones(5, dtype=torch.bool))
    optimizer = longshore.AdamW(ours.named_parameters(), lr=1e-2, servers=two_servers, job="files", shard_elements=65536)
    train(ours, optimizer, range(3))
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    checkpoint.save_safetensors(optimizer, tmp_path / "one", dtype=name)
    checkpoint.save_safetensors(optimizer, tmp_path / "many", dtype=name, max_file_bytes=300_000, model=ours)
    trained_names = [key for key, value in ours.named_parameters() if value.requires_grad]
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert set(one) == set(trained_names)
    flags = ["--dtype", {"fp32": "f32", "bf16": "bf16"}[name], "--max-file-size", "300KiB", "--out", str(tmp_path / "exported")]
    command = [sys.executable, "-m", "longshore", "export", "--servers", two_servers, "--job", "files", *flags]
    subprocess.run(command, check=True, capture_output=True)
    many, exported = read_back(tmp_path / "many"), read_back(tmp_path / "exported")
    assert (set(many), set(exported)) == (set(ours.state_dict()), set(trained_names))
    for key, value in ours.state_dict().items():
        if key in trained_names:
            assert torch.equal(one[key], value.to(dtype))
            assert torch.equal(many[key], value.to(dtype))
            assert torch.equal(exported[key], value.to(dtype))
        else:
            assert torch.equal(many[key], value)
    with pytest.raises(errors.InvalidError, match="not empty"):
        checkpoint.save_safetensors(optimizer, tmp_path / "one")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../model.safetensors"}}'])
def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    optimizer = longshore.AdamW(pair("mlp")[0].named_parameters())
    with pytest.raises(errors.StateError, match=r"model\.safetensors\.index\.json is not readable.*fetch it again"):
        checkpoint.load_safetensors(optimizer, tmp_path)


def test_tensors_that_nobody_asked_for_are_refused_where_that_is_wanted(tmp_path: Path) -> None:
    model, _ = pair("mlp")
    save_file({**model.state_dict(), "layers.9.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    optimizer = longshore.AdamW(model.named_parameters())
    with pytest.raises(errors.StateError, match=r"layers\.9\.weight is in .*must be a parameter of this optimizer.*strict=False"):
        checkpoint.load_safetensors(optimizer, tmp_path, strict=True)
    checkpoint.load_safetensors(optimizer, tmp_path)


def test_the_name_of_the_latest_is_replaced_and_not_written_over(tmp_path: Path) -> None:
    """A writer killed halfway would leave half a name. The old file stays unchanged under another name."""
    ours, _, _ = trained(torch.optim.AdamW)
    optimizer = longshore.AdamW(ours.named_parameters())
    step(ours, optimizer, 0)
    for tag in ("a-long-name", "b"):
        checkpoint.save_deepspeed(optimizer, tmp_path, tag=tag)
        if tag == "a-long-name":
            (tmp_path / "before").hardlink_to(tmp_path / "latest_universal")
    assert ((tmp_path / "before").read_text(), (tmp_path / "latest_universal").read_text()) == ("a-long-name", "b")
