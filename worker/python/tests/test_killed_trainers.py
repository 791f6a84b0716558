"""A trainer that is killed goes on as if nothing had happened: the Hugging Face Trainer, Accelerate and Lightning."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator

import pytest
from conftest import serve
from programs import kill_at, load, random_step, ranks, start

from longshore import errors

pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -r worker/python/tests/requirements.txt"
)

STEPS = 12
ARGUMENTS = {"max_steps": STEPS, "logging_steps": 1, "eval_steps": 3, "save_steps": 4}


@pytest.fixture
def servers(tmp_path: pathlib.Path) -> Iterator[str]:
    process, address = serve("--checkpoint-dir", str(tmp_path / "checkpoints"))
    yield address
    process.kill()
    process.wait()


def test_the_trainer_goes_on_where_the_servers_are_or_where_it_saved(tmp_path: pathlib.Path, servers: str) -> None:
    main = load("trainer")["main"]
    undisturbed = main(str(tmp_path / "plain"), servers, "plain", **ARGUMENTS)
    assert [*undisturbed] == [*range(1, STEPS + 1)]

    killed, saved = tmp_path / "killed", tmp_path / "saved"
    step = random_step(5, STEPS - 1)
    call = f"{str(killed)!r}, {servers!r}, 'killed', **{ARGUMENTS!r}"
    printed = kill_at(step, start("trainer", call))
    assert {at: undisturbed[at] for at in printed} == printed
    shutil.copytree(killed, saved, ignore=shutil.ignore_patterns("partial-*"))

    # Trained from its first step, the job would repeat its data with the learning rates of a new run.
    with pytest.raises(errors.UsageError, match=r"job killed is at step \d+ on its servers.*newest\(trainer\)"):
        main(str(tmp_path / "anew"), servers, "killed", **ARGUMENTS)

    # From the last decided step: nothing is computed again. What the dead process had computed and not written down is missing.
    newest = main(str(killed), servers, "killed", "newest", **ARGUMENTS)
    assert set(undisturbed) - set(newest) <= {step, step + 1}
    assert newest == {at: undisturbed[at] for at in newest}

    # From the last save, with all steps behind it: the servers go back to their checkpoint of it.
    with pytest.warns(UserWarning, match=rf"job killed goes back from version {STEPS} to \d+"):
        assert main(str(saved), servers, "killed", "save", **ARGUMENTS) == undisturbed


def test_two_ranks_of_the_trainer_go_on_as_one(tmp_path: pathlib.Path, servers: str) -> None:
    arguments = {**ARGUMENTS, "dropout": 0.0, "logging_nan_inf_filter": False}
    main = load("trainer")["main"]
    undisturbed = main(str(tmp_path / "plain"), servers, "plain", **arguments)
    halves = {**arguments, "per_device_train_batch_size": 4}
    call = f"{str(tmp_path / 'ranks')!r}, {servers!r}, 'ranks', **{halves!r}"
    printed = kill_at(random_step(5, STEPS - 1), *(start("trainer", call, **rank) for rank in ranks(2)))
    # Half the batch on each of two ranks is the same mean, added up in another order.
    assert printed == pytest.approx({at: undisturbed[at] for at in printed}, rel=1e-4)
    resumed = main(str(tmp_path / "ranks"), servers, "ranks", "save", **arguments)
    assert resumed == pytest.approx(undisturbed, rel=1e-4)
    assert [*resumed] == [*undisturbed]


def test_the_trainer_with_an_optimizer_that_was_built_before(tmp_path: pathlib.Path, servers: str) -> None:
    names = load("trainer")
    undisturbed = names["main"](str(tmp_path / "plain"), servers, "plain", **ARGUMENTS)
    step = random_step(5, STEPS - 1)
    call = f"{str(tmp_path / 'built')!r}, {servers!r}, 'built', is_built=True, **{ARGUMENTS!r}"
    # In one group instead of the Trainer's two; without weight decay these train alike.
    kill_at(step, start("trainer", call))
    # In the step after a save the servers may still be where the save is.
    with contextlib.nullcontext() if step == 8 else pytest.warns(UserWarning, match="goes back"):
        assert names["main"](str(tmp_path / "built"), servers, "built", "save", is_built=True, **ARGUMENTS) == undisturbed


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
