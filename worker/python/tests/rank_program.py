"""What the programs of ranks share: they meet over gloo, make the runs that their arguments say, and keep what each gave."""

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
    """The process's arguments are a folder for what was found, and a JSON list of [way, options]. ``make`` makes a run of these. ``end`` ends
    what is left, while the ranks can still meet."""
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
        os._exit(1)  # at once: the others wait for this rank, and what torch does at the end waits for them
