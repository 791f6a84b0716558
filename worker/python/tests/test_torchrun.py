"""torchrun starts two ranks, and restarts them after a kill. The ranks continue from the last step, to the undisturbed bits. A rank runs
rank.py."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from conftest import ended_after, several
from forked import Forked
from rank import STEPS
from test_ranks import are_equal, run


#: The version at which rank 1 kills itself, before its step.
DIES_AT = 3


def run_by_torchrun(out: Path, runs: list[Any]) -> dict[str, Any]:
    """Returns the results of rank 0."""
    program = Path(__file__).with_name("rank.py")
    launcher = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(program), str(out), json.dumps(runs)]
    # Otherwise the launcher's store outlives the ranks, and gloo takes the old ranks' addresses for its peers'.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    code = f"from torch.distributed.run import main; main({launcher!r})"
    process = Forked(code, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with ended_after(240, process):
        said = process.communicate()[0]
    assert process.returncode == 0, said
    [found] = torch.load(out / "0.pt", weights_only=True)
    return dict(found)


def test_a_rank_that_is_killed_comes_again(tmp_path: Path) -> None:
    with several(2, "1GiB") as servers:
        options = {"servers": servers, "max_grad_norm": 0.5}
        [undisturbed, _] = run(tmp_path, [("scatter", {**options, "job": "undisturbed", "dies_at": STEPS})], 2)[0]
        restarted = run_by_torchrun(tmp_path, [("scatter", {**options, "job": "restarted", "dies_at": DIES_AT})])
    assert (undisturbed["restarts"], undisturbed["version"]) == (0, 0)
    assert (restarted["restarts"], restarted["version"]) == (1, DIES_AT)
    assert undisturbed["hash"] == restarted["hash"] and undisturbed["hash"][0] == STEPS
    assert restarted["losses"] == undisturbed["losses"][DIES_AT:]
    assert are_equal(undisturbed["weights"], restarted["weights"])
