"""Main program of ranks: connects them over gloo, makes the runs in the arguments, and keeps each result."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed


def main(make: Callable[[str, dict[str, Any]], Any], end: Callable[[], None] = lambda: None) -> None:
    """Runs a rank's program. The process's arguments are a folder for results, and a JSON list of [way, options], each a call of ``make``.
    ``end`` ends remaining jobs while the ranks can still meet."""
    try:
        torch.set_num_threads(1)
        distributed.init_process_group("gloo")
        out, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
        torch.save([make(way, options) for way, options in runs], out / f"{os.environ['RANK']}.pt")
        end()
        distributed.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: the others wait for this rank, and torch's exit waits for them
