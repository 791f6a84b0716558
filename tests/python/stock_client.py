"""Trains over the wire with stock gRPC, written from docs/protocol.md and the .proto files alone.

Two ranks train a job on several servers. The job has exact, delayed and skipped steps. Its rank 0 dies during a commit, a step is taken
back, the job pauses, and is restored from a checkpoint. A second job leaves out parameters without a gradient, and a third has partitions.
Every version and every state is compared bit for bit with NumPy's. The servers need --state-dir and --checkpoint-dir. The parts are in the
folder stock.
"""

import argparse
import pathlib
import tempfile
import time

from stock.left_out import LeftOut
from stock.partitions import Partitions
from stock.scenario import Scenario
from stock.wire import Protocol


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--protos", type=pathlib.Path, required=True, help="folder of longshore/v1/*.proto")
    parser.add_argument("--servers", required=True, help="host:port,host:port,host:port")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        protocol = Protocol(arguments.protos, pathlib.Path(folder))
        for scenario, dtype, tier in [
            (Scenario, "bf16", "nvme"),
            (Scenario, "f32", "memory"),
            (LeftOut, "bf16", "memory"),
            (Partitions, "bf16", "memory"),
        ]:
            started = time.monotonic()
            scenario(protocol, arguments.servers.split(","), dtype, tier).play()
            print(f"{scenario.__name__}, {dtype}, tier {tier}: every bit as NumPy computes it, in {time.monotonic() - started:.1f} s")
    print("ok")


if __name__ == "__main__":
    main()
