"""A killed trainer continues as if nothing had happened: the Hugging Face Trainer, Accelerate and Lightning."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import accelerated
import lit
import pytest
import torch
import trainer as example
import transformers
from conftest import running
from programs import arguments, kill_at, random_step, ranks, start

import longshore
import longshore.huggingface
from longshore import errors

STEPS = 12
ARGUMENTS = {"max_steps": STEPS, "logging_steps": 1, "eval_steps": 3, "save_steps": 4}


@pytest.fixture
def servers(tmp_path: pathlib.Path) -> Iterator[str]:
    with running("--checkpoint-dir", str(tmp_path / "checkpoints")) as address:
        yield address


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Returns the losses of an undisturbed run of the Trainer."""
    losses: dict[int, float] = example.main(str(tmp_path_factory.mktemp("plain")), **ARGUMENTS)
    assert [*losses] == [*range(1, STEPS + 1)]
    return losses


def killed(undisturbed: dict[int, float], name: str, *given: str, number: int = 1, **more: Any) -> int:
    """Kills an example's ranks at a random step. Its losses until then are those of an undisturbed run. Returns the step."""
    step = random_step(5, STEPS - 1)
    call = ", ".join([*map(repr, given), f"**{more!r}"])
    printed = kill_at(step, *(start(name, call, **place) for place in (ranks(number) if number > 1 else [{}])))
    expected = {at: undisturbed[at] for at in printed}
    # Each of two ranks has half of the batch. The mean is the same, but its sum has another order.
    assert printed == (expected if number == 1 else pytest.approx(expected, rel=1e-4))
    return step


def test_the_trainer_goes_on_where_the_servers_are_or_where_it_saved(
    tmp_path: pathlib.Path, servers: str, undisturbed: dict[int, float]
) -> None:
    folder, saved = tmp_path / "killed", tmp_path / "saved"
    step = killed(undisturbed, "trainer", str(folder), servers, "killed", **ARGUMENTS)
    shutil.copytree(folder, saved, ignore=shutil.ignore_patterns("partial-*"))

    # A run from the first step would repeat its data with the learning rates of a new run, and is refused.
    with pytest.raises(errors.UsageError, match=r"job killed is at step \d+ on its servers.*newest\(trainer\)"):
        example.main(str(tmp_path / "anew"), servers, "killed", **ARGUMENTS)

    # The run continues from the last decided step, and repeats none. Losses that the dead process computed but did not
    # write are missing.
    newest = example.main(str(folder), servers, "killed", "newest", **ARGUMENTS)
    assert set(undisturbed) - set(newest) <= {step, step + 1}
    assert newest == {at: undisturbed[at] for at in newest}

    # The run continues from its last save, although the servers have later steps. The servers go back to the checkpoint
    # of that save.
    with pytest.warns(UserWarning, match=rf"job killed goes back from version {STEPS} to \d+"):
        assert example.main(str(saved), servers, "killed", "save", **ARGUMENTS) == undisturbed


def test_the_trainer_goes_on_from_a_save_of_a_server_inside_its_process(tmp_path: pathlib.Path, undisturbed: dict[int, float]) -> None:
    killed(undisturbed, "trainer", str(tmp_path / "killed"), **ARGUMENTS)
    assert example.main(str(tmp_path / "killed"), None, None, "save", **ARGUMENTS) == undisturbed


def test_a_save_within_that_of_the_state_counts_as_cut_short(tmp_path: pathlib.Path) -> None:
    from longshore.checkpoint.trainer import last_whole

    assert last_whole(tmp_path / "absent") is None
    for step, state in ((4, "{}"), (12, '{"global_step": 1'), (8, "{}")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-16").mkdir()
    assert last_whole(tmp_path) == tmp_path / "checkpoint-8"


def test_the_best_save_has_all_state_where_the_server_ends_with_the_process(tmp_path: pathlib.Path) -> None:
    """The Trainer reports after such a save that it was the best."""
    best = {"save_strategy": "best", "metric_for_best_model": "eval_loss", "eval_steps": 1, "max_steps": 1}
    example.main(str(tmp_path), **{**ARGUMENTS, **best})
    saved = torch.load(tmp_path / "checkpoint-1" / "optimizer.pt", weights_only=True)
    assert "exp_avg" in saved["state"][0]


def test_a_callback_that_comes_late_says_that_names_are_lacking(tmp_path: pathlib.Path) -> None:
    rule = {"optimizer_cls_and_kwargs": (longshore.AdamW, {"lr": 1e-3})}
    trainer = transformers.Trainer(example.tiny_llama(), arguments(tmp_path, max_steps=1), train_dataset=example.Counting(), **rule)
    trainer.add_callback(longshore.huggingface.Callback())
    with pytest.warns(UserWarning, match=r"named by their places.*callbacks=\[longshore\.huggingface\.Callback\(\)\]"):
        trainer.train()


def goes_back(step: int) -> Any:
    """Expects the servers' warning. In the step after a save they may still be at the save's version."""
    return contextlib.nullcontext() if step == 8 else pytest.warns(UserWarning, match="goes back")


def test_two_ranks_of_the_trainer_go_on_as_one(tmp_path: pathlib.Path, servers: str) -> None:
    more = {**ARGUMENTS, "dropout": 0.0, "logging_nan_inf_filter": False}
    undisturbed = example.main(str(tmp_path / "plain"), servers, "plain", **more)
    given = str(tmp_path / "ranks"), servers, "ranks"
    killed(undisturbed, "trainer", *given, number=2, **{**more, "per_device_train_batch_size": 4})
    resumed = example.main(*given, "save", **more)
    assert resumed == pytest.approx(undisturbed, rel=1e-4) and [*resumed] == [*undisturbed]


@pytest.mark.parametrize("number", [1, 2])
def test_accelerate_goes_on_from_its_last_save(tmp_path: pathlib.Path, servers: str, number: int) -> None:
    """Two ranks go on as one."""
    dropout = {} if number == 1 else {"dropout": 0.0}
    undisturbed = accelerated.main(str(tmp_path / "plain"), servers, "plain", **dropout)
    assert [*undisturbed] == [*range(1, STEPS + 1)]
    given = str(tmp_path / "killed"), servers, "killed"
    killed(undisturbed, "accelerated", *given, number=number, **dropout)
    resumed = accelerated.main(*given, **dropout)
    assert resumed == (undisturbed if number == 1 else pytest.approx(undisturbed, rel=1e-4)) and [*resumed] == [*undisturbed]


@pytest.mark.parametrize("strategy", ["auto", "longshore"])
def test_lightning_goes_on_from_its_last_save(tmp_path: pathlib.Path, servers: str, strategy: str) -> None:
    undisturbed = lit.main(str(tmp_path / "plain"), servers, "plain", strategy=strategy)
    assert [*undisturbed] == [*range(2 * STEPS)]
    given = str(tmp_path / "killed"), servers, "killed"
    with goes_back(killed(undisturbed, "lit", *given, strategy=strategy)):
        resumed = lit.main(*given, "last", strategy=strategy)
    assert resumed == {at: undisturbed[at] for at in resumed}
    assert [*resumed][-1] == 2 * STEPS - 1
