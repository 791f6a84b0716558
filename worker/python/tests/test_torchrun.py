"""torchrun starts two ranks, and restarts them after a kill. The ranks continue from the last step, to the undisturbed bits. A rank runs
restarted_rank.py."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ended_after, several
from forked import Forked
from programs import ranks
from restarted_rank import KILLED_AT, STEPS
from torch import distributed

from longshore.distributed import agree, collectives
from longshore.errors import LongshoreError

PROGRAM = Path(__file__).with_name("restarted_rank.py")


def run(out: Path, options: dict[str, Any], started: Callable[..., list[Forked]]) -> dict[str, Any]:
    """Returns the results of rank 0, once all processes have ended."""
    processes = started(str(out), json.dumps(options))
    with ended_after(240, *processes):
        said = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), said
    found: dict[str, Any] = torch.load(out, weights_only=True)
    return found


def by_torchrun(*arguments: str) -> list[Forked]:
    launcher = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(PROGRAM), *arguments]
    code = f"from torch.distributed.run import main; main({launcher!r})"
    # Otherwise the launcher's store outlives the ranks, and gloo takes the old ranks' addresses for its peers'.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [Forked(code, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)]


def undisturbed_ranks(*arguments: str) -> list[Forked]:
    environments = [{**os.environ, **place, "TORCHELASTIC_RESTART_COUNT": "0"} for place in ranks(2)]
    return [
        Forked(PROGRAM, *arguments, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for environment in environments
    ]


def test_a_rank_that_is_killed_comes_again(tmp_path: Path) -> None:
    with several(2, "1GiB") as servers:
        options = {"servers": servers, "partition": "reduce-scatter"}
        undisturbed = run(tmp_path / "undisturbed.pt", {**options, "job": "undisturbed"}, undisturbed_ranks)
        restarted = run(tmp_path / "restarted.pt", {**options, "job": "restarted", "is_killed": True}, by_torchrun)
    assert (undisturbed["restarts"], undisturbed["joined"]) == (0, 0)
    joined = restarted["joined"]
    assert (restarted["restarts"], joined) == (1, KILLED_AT)
    assert undisturbed["hash"] == restarted["hash"] and undisturbed["hash"][0] == STEPS
    assert restarted["losses"] == undisturbed["losses"][joined:]
    for theirs, ours in zip(undisturbed["weights"], restarted["weights"], strict=True):
        assert torch.equal(theirs, ours)


def test_what_ranks_said_before_they_were_started_again_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's store may outlive the ranks."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    try:
        told = LongshoreError("the server of shard 3 did not answer")
        for count, raised in (("0", True), ("1", False)):
            monkeypatch.setattr(collectives, "_failed", None)
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
            if raised:
                collectives._tell(told)
            with pytest.raises(LongshoreError, match="shard 3") if raised else contextlib.nullcontext():
                collectives._raise_failure()

        def fail() -> None:
            raise told

        monkeypatch.setattr(agree, "can_meet", lambda world_size: True)
        monkeypatch.setattr(agree, "_known", {})
        with pytest.raises(LongshoreError, match="shard 3"):
            agree.rank_0_first("job", 0, 2, fail, is_shared=True)
        monkeypatch.setattr(agree, "_wait", look)
        # The other rank, as a separate process, in the same attempt and in the next one.
        for count, raised_by_look in (("1", False), ("2", True)):
            monkeypatch.setattr(agree, "_known", {})
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
            with pytest.raises(LookupError if raised_by_look else LongshoreError):
                agree.rank_0_first("job", 1, 2, lambda: None, is_shared=True)
    finally:
        distributed.destroy_process_group()


def look(store: Any, job: str, number: int) -> None:
    """Looks once instead of until rank 0 has written."""
    if not store.check([agree._key(job, number)]):
        raise LookupError(job)
