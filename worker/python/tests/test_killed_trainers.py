"""A killed trainer continues as if nothing had happened: the Hugging Face Trainer, Accelerate and Lightning."""

import contextlib
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from conftest import running
from programs import kill_at, load, random_step, ranks, start
from safetensors.torch import load_file

import longshore
from longshore import errors

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -r worker/python/tests/requirements.txt"
)
import longshore.huggingface  # noqa: E402

STEPS = 12
ARGUMENTS = {"max_steps": STEPS, "logging_steps": 1, "eval_steps": 3, "save_steps": 4}


@pytest.fixture
def servers(tmp_path: pathlib.Path) -> Iterator[str]:
    with running("--checkpoint-dir", str(tmp_path / "checkpoints")) as address:
        yield address


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Returns the losses of an undisturbed run of the Trainer."""
    losses: dict[int, float] = load("trainer")["main"](str(tmp_path_factory.mktemp("plain")), **ARGUMENTS)
    assert [*losses] == [*range(1, STEPS + 1)]
    return losses


def test_the_trainer_goes_on_where_the_servers_are_or_where_it_saved(
    tmp_path: pathlib.Path, servers: str, undisturbed: dict[int, float]
) -> None:
    main = load("trainer")["main"]
    killed, saved = tmp_path / "killed", tmp_path / "saved"
    step = random_step(5, STEPS - 1)
    call = f"{str(killed)!r}, {servers!r}, 'killed', **{ARGUMENTS!r}"
    printed = kill_at(step, start("trainer", call))
    assert {at: undisturbed[at] for at in printed} == printed
    shutil.copytree(killed, saved, ignore=shutil.ignore_patterns("partial-*"))

    # A run from the first step would repeat its data with the learning rates of a new run, and is refused.
    with pytest.raises(errors.UsageError, match=r"job killed is at step \d+ on its servers.*newest\(trainer\)"):
        main(str(tmp_path / "anew"), servers, "killed", **ARGUMENTS)

    # From the last decided step: no step is repeated. Losses that the dead process computed and did not write are missing.
    newest = main(str(killed), servers, "killed", "newest", **ARGUMENTS)
    assert set(undisturbed) - set(newest) <= {step, step + 1}
    assert newest == {at: undisturbed[at] for at in newest}

    # From the last save, with later steps on the servers: the servers go back to their checkpoint of the save.
    with pytest.warns(UserWarning, match=rf"job killed goes back from version {STEPS} to \d+"):
        assert main(str(saved), servers, "killed", "save", **ARGUMENTS) == undisturbed


def test_the_trainer_goes_on_from_a_save_of_a_server_inside_its_process(tmp_path: pathlib.Path, undisturbed: dict[int, float]) -> None:
    main = load("trainer")["main"]
    step = random_step(5, STEPS - 1)
    printed = kill_at(step, start("trainer", f"{str(tmp_path / 'killed')!r}, **{ARGUMENTS!r}"))
    assert {at: undisturbed[at] for at in printed} == printed
    assert main(str(tmp_path / "killed"), None, None, "save", **ARGUMENTS) == undisturbed


def test_a_save_that_a_kill_cut_short_is_left_out(tmp_path: pathlib.Path, servers: str) -> None:
    main = load("trainer")["main"]
    arguments = {**ARGUMENTS, "lr_scheduler_type": "constant"}
    undisturbed = main(str(tmp_path / "plain"), servers, "plain", **arguments)
    output = tmp_path / "cut"
    main(str(output), servers, "cut", **{**arguments, "max_steps": 6})
    # The Trainer writes these files in place, in this order.
    cut = output / "checkpoint-6"
    (cut / "trainer_state.json").unlink()
    (cut / "rng_state.pth").unlink()
    (cut / "optimizer.pt").write_bytes((cut / "optimizer.pt").read_bytes()[:100])
    resumed = main(str(output), servers, "cut", "newest", **arguments)
    assert resumed == {at: undisturbed[at] for at in resumed}
    assert set(resumed) >= {*range(1, 6), *range(7, STEPS + 1)}


def test_a_save_within_that_of_the_state_counts_as_cut_short(tmp_path: pathlib.Path) -> None:
    from longshore.integrations.huggingface import last_whole

    assert last_whole(tmp_path / "absent") is None
    for step, state in ((4, "{}"), (12, '{"global_step": 1'), (8, "{}")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-16").mkdir()
    assert last_whole(tmp_path) == tmp_path / "checkpoint-8"


def test_the_best_save_has_all_state_where_the_server_ends_with_the_process(tmp_path: pathlib.Path) -> None:
    """The Trainer reports after such a save that it was the best."""
    best = {"save_strategy": "best", "metric_for_best_model": "eval_loss", "eval_steps": 1, "max_steps": 1}
    load("trainer")["main"](str(tmp_path), **{**ARGUMENTS, **best})
    saved = torch.load(tmp_path / "checkpoint-1" / "optimizer.pt", weights_only=True)
    assert "exp_avg" in saved["state"][0]


def test_a_callback_that_comes_late_says_that_names_are_lacking(tmp_path: pathlib.Path) -> None:
    names = load("trainer")
    args = transformers.TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
    rule = {"optimizer_cls_and_kwargs": (longshore.AdamW, {"lr": 1e-3})}
    trainer = transformers.Trainer(names["tiny_llama"](), args, train_dataset=names["Counting"](), **rule)
    trainer.add_callback(longshore.huggingface.Callback())
    with pytest.warns(UserWarning, match=r"named by their places.*callbacks=\[longshore\.huggingface\.Callback\(\)\]"):
        trainer.train()


def test_jobs_of_the_trainer_have_the_models_names(tmp_path: pathlib.Path, servers: str) -> None:
    main = load("trainer")["main"]
    main(str(tmp_path / "named"), servers, "named", max_steps=1)
    command = [sys.executable, "-m", "longshore", "export", "--servers", servers, "--job", "named", "--out", str(tmp_path / "exported")]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    [file] = (tmp_path / "exported").glob("*.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight" in load_file(file)


def test_two_ranks_of_the_trainer_go_on_as_one(tmp_path: pathlib.Path, servers: str) -> None:
    arguments = {**ARGUMENTS, "dropout": 0.0, "logging_nan_inf_filter": False}
    main = load("trainer")["main"]
    undisturbed = main(str(tmp_path / "plain"), servers, "plain", **arguments)
    halves = {**arguments, "per_device_train_batch_size": 4}
    call = f"{str(tmp_path / 'ranks')!r}, {servers!r}, 'ranks', **{halves!r}"
    printed = kill_at(random_step(5, STEPS - 1), *(start("trainer", call, **rank) for rank in ranks(2)))
    # Half the batch on each of two ranks has the same mean, summed in another order.
    assert printed == pytest.approx({at: undisturbed[at] for at in printed}, rel=1e-4)
    resumed = main(str(tmp_path / "ranks"), servers, "ranks", "save", **arguments)
    assert resumed == pytest.approx(undisturbed, rel=1e-4)
    assert [*resumed] == [*undisturbed]


def test_the_trainer_with_an_optimizer_that_was_built_before(
    tmp_path: pathlib.Path, servers: str, undisturbed: dict[int, float]
) -> None:
    main = load("trainer")["main"]
    step = random_step(5, STEPS - 1)
    call = f"{str(tmp_path / 'built')!r}, {servers!r}, 'built', is_built=True, **{ARGUMENTS!r}"
    # A single group instead of the Trainer's two, which train alike without weight decay.
    kill_at(step, start("trainer", call))
    # In the step after a save the servers may still be at the save's version.
    with contextlib.nullcontext() if step == 8 else pytest.warns(UserWarning, match="goes back"):
        assert main(str(tmp_path / "built"), servers, "built", "save", is_built=True, **ARGUMENTS) == undisturbed


def test_accelerate_goes_on_from_its_last_save(tmp_path: pathlib.Path, servers: str) -> None:
    main = load("accelerated")["main"]
    undisturbed = main(str(tmp_path / "plain"), servers, "plain")
    assert [*undisturbed] == [*range(1, STEPS + 1)]
    step = random_step(5, STEPS - 1)
    printed = kill_at(step, start("accelerated", f"{str(tmp_path / 'killed')!r}, {servers!r}, 'killed'"))
    assert {at: undisturbed[at] for at in printed} == printed
    assert main(str(tmp_path / "killed"), servers, "killed") == undisturbed


@pytest.mark.parametrize("strategy", ["auto", "longshore"])
def test_lightning_goes_on_from_its_last_save(tmp_path: pathlib.Path, servers: str, strategy: str) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: pip install -r worker/python/tests/requirements.txt")
    main = load("lit")["main"]
    undisturbed = main(str(tmp_path / "plain"), servers, "plain", strategy=strategy)
    assert [*undisturbed] == [*range(2 * STEPS)]
    step = random_step(5, STEPS - 1)
    call = f"{str(tmp_path / 'killed')!r}, {servers!r}, 'killed', strategy={strategy!r}"
    printed = kill_at(step, start("lit", call))
    assert {at: undisturbed[at] for at in printed} == printed
    with contextlib.nullcontext() if step == 8 else pytest.warns(UserWarning, match="goes back"):
        resumed = main(str(tmp_path / "killed"), servers, "killed", "last", strategy=strategy)
    assert resumed == {at: undisturbed[at] for at in resumed}
    assert [*resumed][-1] == 2 * STEPS - 1


def test_two_ranks_of_accelerate_go_on_as_one(tmp_path: pathlib.Path, servers: str) -> None:
    main = load("accelerated")["main"]
    undisturbed = main(str(tmp_path / "plain"), servers, "plain", dropout=0.0)
    call = f"{str(tmp_path / 'ranks')!r}, {servers!r}, 'ranks', dropout=0.0"
    printed = kill_at(random_step(5, STEPS - 1), *(start("accelerated", call, **rank) for rank in ranks(2)))
    # Half the batch on each of two ranks has the same mean, summed in another order.
    assert printed == pytest.approx({at: undisturbed[at] for at in printed}, rel=1e-4)
    resumed = main(str(tmp_path / "ranks"), servers, "ranks", dropout=0.0)
    assert resumed == pytest.approx(undisturbed, rel=1e-4)
    assert [*resumed] == [*undisturbed]


def test_two_ranks_of_lightning_go_on_as_one(tmp_path: pathlib.Path, servers: str) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: pip install -r worker/python/tests/requirements.txt")
    main = load("lit")["main"]
    undisturbed = main(str(tmp_path / "plain"), servers, "plain", strategy="longshore", clip=None)
    folders = [tmp_path / f"rank-{rank}" for rank in range(2)]
    calls = [f"{str(folder)!r}, {servers!r}, 'ranks', strategy='longshore', clip=None" for folder in folders]
    started = [start("lit", call, TORCHELASTIC_RUN_ID="none", **rank) for call, rank in zip(calls, ranks(2), strict=True)]
    step = random_step(5, STEPS - 1)
    first = kill_at(step, *started)
    assert started[1].stdout is not None
    second = dict(read_loss(line) for line in started[1].stdout if line.startswith("loss "))
    # The servers sum the ranks' gradients of the halves of a batch.
    means = {at: (first[at] + second[at]) / 2 for at in first.keys() & second.keys()}
    assert len(means) >= 2 * step - 2
    assert means == pytest.approx({at: undisturbed[at] for at in means}, rel=1e-4)
    resumed = main(str(folders[0]), servers, "ranks", "last", strategy="longshore", clip=None)
    assert resumed == pytest.approx({at: undisturbed[at] for at in resumed}, rel=1e-4)
    assert [*resumed][-1] == 2 * STEPS - 1


def read_loss(line: str) -> tuple[int, float]:
    _, at, value = line.split()
    return int(at), float(value)
