"""Main program of ranks: connects them over gloo, makes the runs in the arguments, and keeps each result."""

import datetime
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed


def main(make: Callable[[str, dict[str, Any]], Any], end: Callable[[], None] = lambda: None, timeout: float = 120) -> None:
    """Runs a rank's program, and ends the process. Its arguments are a folder for results, and a JSON list of [way, options], each a call of
    ``make``. ``end`` ends what remains while the ranks can still meet. ``timeout`` is torch.distributed's, in seconds."""
    # A rank that hangs prints its stacks before it ends.
    faulthandler.dump_traceback_later(float(os.environ.get("LONGSHORE_TEST_SECONDS", "220")), exit=True)
    try:
        torch.set_num_threads(1)
        distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
        out, found = Path(sys.argv[1]), []
        for way, options in json.loads(sys.argv[2]):
            # For a rank that hangs, this is the last message.
            print(f"{time.monotonic():.1f} {way} {options}", file=sys.stderr, flush=True)
            found.append(make(way, options))
        torch.save(found, out / f"{os.environ['RANK']}.pt")
        end()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: the others wait for this rank, and torch's exit waits for them
    sys.stdout.flush()
    os._exit(0)  # a group with a rank's expired wait cannot be ended
