"""Trains over the wire with stock gRPC, written from docs/protocol.md and the .proto files alone.

Two ranks train a job on several servers. The job has exact, delayed and skipped steps. Its rank 0 dies during a commit, and it is restored
from a checkpoint. Every version and every state is compared bit for bit with NumPy's. The servers need --state-dir and --checkpoint-dir.
The parts are in the folder stock.
"""

import argparse
import pathlib
import tempfile
import time

from stock.scenario import Scenario
from stock.wire import Protocol


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--protos", type=pathlib.Path, required=True, help="folder of longshore/v1/*.proto")
    parser.add_argument("--servers", required=True, help="host:port,host:port,host:port")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        protocol = Protocol(arguments.protos, pathlib.Path(folder))
        for dtype, tier in [("bf16", "nvme"), ("f32", "memory")]:
            started = time.monotonic()
            Scenario(protocol, arguments.servers.split(","), dtype, tier).play()
            print(f"{dtype}, tier {tier}: every bit as NumPy computes it, in {time.monotonic() - started:.1f} s")
    print("ok")


if __name__ == "__main__":
    main()
