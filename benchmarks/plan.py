#!/usr/bin/env python3
"""Compares `longshore plan` with real runs, and prints the tables of docs/plan.md.

Each server is a `longshored` in its own network namespace, behind a link that the kernel shapes each way. So the script needs root, `ip`
and `tc`. `hosts` and `prefetch` need a Python that has the package and PyTorch. Usage: benchmarks/plan.py links | configurations |
hosts | prefetch    [--programs target/release] [--only NAME...] [--state-dir DIR --drives GB/S] [--python PYTHON]
"""

import argparse
import contextlib
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

PORT = 7070


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Servers:
    """``count`` servers, each in a network namespace of its own behind a link of ``link`` bytes a second, or unlimited."""

    def __init__(self, programs, count, link=None, flags=(), folder=None):
        self.programs, self.count, self.link, self.flags, self.folder = programs, count, link, flags, folder
        self.processes = []

    def __enter__(self):
        try:
            for index in range(self.count):
                self.start(index)
            for index in range(self.count):
                self.wait(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, index):
        name, outside, inside = f"longshore-{index}", f"ls{index}o", f"ls{index}i"
        run("ip", "netns", "add", name)
        run("ip", "link", "add", outside, "mtu", "9000", "type", "veth", "peer", "name", inside, "mtu", "9000")
        run("ip", "link", "set", inside, "netns", name)
        run("ip", "addr", "add", f"10.213.{index}.1/30", "dev", outside)
        run("ip", "link", "set", outside, "up")
        within = ("ip", "netns", "exec", name)
        run(*within, "ip", "addr", "add", f"10.213.{index}.2/30", "dev", inside)
        run(*within, "ip", "link", "set", inside, "up")
        run(*within, "ip", "link", "set", "lo", "up")
        if self.link:
            shape = ("root", "tbf", "rate", f"{self.link * 8}bit", "burst", "128kb", "latency", "20ms")
            run("tc", "qdisc", "add", "dev", outside, *shape)
            run(*within, "tc", "qdisc", "add", "dev", inside, *shape)
        command = [*within, self.programs / "longshored", "--listen", f"10.213.{index}.2:{PORT}", "--insecure", *self.flags]
        if self.folder:
            state = pathlib.Path(self.folder) / str(index)
            state.mkdir()
            command += ["--state-dir", state]
        # The log would fill a pipe without a reader.
        self.processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def wait(self, index):
        until = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection((f"10.213.{index}.2", PORT), timeout=1).close()
                return
            if time.monotonic() > until or self.processes[index].poll() is not None:
                sys.exit(f"server {index} does not start")
            time.sleep(0.05)

    def addresses(self):
        return ",".join(f"10.213.{index}.2:{PORT}" for index in range(self.count))

    def most_resident(self):
        """Returns the largest memory of a server's process so far, in bytes."""
        # `ip netns exec` becomes the program that it starts.
        texts = [pathlib.Path(f"/proc/{process.pid}/status").read_text() for process in self.processes]
        return max(int(re.search(r"VmHWM:\s+(\d+) kB", text).group(1)) * 1024 for text in texts)

    def __exit__(self, *_):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()
        for index in range(self.count):
            subprocess.run(["ip", "link", "del", f"ls{index}o"], capture_output=True)
            subprocess.run(["ip", "netns", "del", f"longshore-{index}"], capture_output=True)


def step(programs, servers, *flags):
    command = [programs / "longshore", "bench", "step", "--json", "--servers", servers.addresses(), *flags]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def links(args):
    """The simulator against 1, 2, 4 and 8 servers whose links bind."""
    print("| servers | delay | compute s | step s | plan says s | measured over plan | efficiency |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    link, params = 25_000_000, 67_108_864
    cases = [("0", 0), ("0", 2000), ("1", 1000)]
    for delay, compute_ms in cases:
        # With these counts, the median step lies in the middle of a run.
        steps = 5 if delay == "1" else 3 if compute_ms else 2
        alone = None
        for count in (1, 2, 4, 8):
            if args.only and f"{count}/{delay}/{compute_ms}" not in args.only:
                continue
            with Servers(args.programs, count, link, ["--memory", "3GiB"]) as servers:
                found = step(
                    args.programs, servers, "--params", params, "--server-link", link, "--delay", delay, "--compute-ms",
                    compute_ms, "--shard-elements", 1 << 20, "--rounds", 1, "--steps", steps,
                )  # fmt: skip
            alone = alone or found["step_ms"] * count
            print(
                f"| {count} | {delay} | {compute_ms / 1e3:.1f} | {found['step_ms'] / 1e3:.2f} | "
                f"{found['predicted_ms'] / 1e3:.2f} | {found['step_over_predicted']:.3f} | "
                f"{alone / found['step_ms'] / count:.3f} |",
                flush=True,
            )


LINK = 100_000_000

# For each name: servers, the bench's flags except its size, the plan's flags that differ from these, and parameters.
CONFIGURATIONS = {
    "exact": (1, [], [], 134_217_728),
    "exact, 4 s of compute": (1, ["--compute-ms", 4000], [], 134_217_728),
    "delayed, 2 s of compute": (1, ["--delay", 1, "--compute-ms", 2000], ["--delay", 1], 134_217_728),
    "2 ranks": (1, ["--ranks", 2], ["--world-size", 2], 134_217_728),
    "2 micro-steps": (1, ["--micro-steps", 2], ["--micro-steps", 2], 134_217_728),
    "bf16 moments and master weights": (1, ["--state", "bf16", "--master", "bf16"], ["--state", "bf16", "--master", "bf16"], 201_326_592),
    "block8 moments": (1, ["--state", "block8"], ["--state", "block8"], 201_326_592),
    "2 servers": (2, [], [], 268_435_456),
    "nvme": (1, ["--tier", "nvme"], ["--tier", "nvme"], 201_326_592),
    "nvme, spill all": (1, ["--tier", "nvme", "--spill", "all"], ["--tier", "nvme", "--spill", "all"], 201_326_592),
    "nvme, spill all, bf16 moments and master weights": (
        1,
        ["--tier", "nvme", "--spill", "all", "--state", "bf16", "--master", "bf16"],
        ["--tier", "nvme", "--spill", "all", "--state", "bf16", "--master", "bf16"],
        1_098_907_648,
    ),
}


def words(parts):
    return " ".join(str(part) for part in parts)


class Configuration:
    """The commands of a row."""

    def __init__(self, args, name):
        self.count, self.of_step, self.of_plan, self.params = CONFIGURATIONS[name]
        self.on_drives = "nvme" in self.of_step
        self.link = LINK * 10 if self.on_drives else LINK
        # With overlapping steps, the steps in the middle of a run count.
        overlap = "--delay" in self.of_step or self.on_drives
        self.steps = 3 if overlap else 2 if "--compute-ms" in self.of_step else 1
        self.server = ["--memory", "8GiB", *(["--spill", "all"] if "--spill" in self.of_step else [])]
        self.drives = ["--drives", int((args.drives or 3.9) * 1e9)] if self.on_drives else []

    def plan(self):
        return ["--params", self.params, "--servers", self.count, *self.of_plan]

    def step(self):
        return ["--params", self.params, "--server-link", self.link, "--rounds", 1, "--steps",
                self.steps, *self.of_step, *self.drives]  # fmt: skip


def ask(args, *flags):
    """Returns the output of `longshore plan`."""
    command = [args.programs / "longshore", "plan", "--json", *flags]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    # A plan that does not fit is an error, but still prints its result.
    if not done.stdout:
        sys.exit(f"{words(command)}: {done.stderr}")
    return json.loads(done.stdout)


def configurations(args):
    """Memory and steps of configurations against the plan."""
    unknown = set(args.only or []) - set(CONFIGURATIONS)
    if unknown:
        sys.exit(f"--only names {', '.join(sorted(unknown))}, but must name some of: {'; '.join(CONFIGURATIONS)}")
    on_drives = [name for name in args.only or CONFIGURATIONS if name.startswith("nvme")]
    if on_drives and not (args.state_dir and args.drives):
        sys.exit(
            f"{', '.join(on_drives)}: give --state-dir, a folder of the drive, and --drives, its GB/s as `longshore plan --probe "
            "--probe-dir` of that folder says, or leave them out with --only"
        )
    print("| configuration | parameters | plan says MB | most resident MB | of the plan | step s | plan says s | "
          "measured over plan |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in CONFIGURATIONS:
        if name not in (args.only or CONFIGURATIONS):
            continue
        case = Configuration(args, name)
        planned = ask(args, *case.plan())
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=args.state_dir)) if case.on_drives else None
            servers = stack.enter_context(Servers(args.programs, case.count, case.link, case.server, folder))
            found = step(args.programs, servers, *case.step())
            resident = servers.most_resident()
        memory = planned["memory_bytes"] + planned["process_bytes"]
        row = [
            name, f"{case.params / 1e6:.0f} M", f"{memory / 1e6:.0f}", f"{resident / 1e6:.0f}",
            f"{resident / memory:.3f}", f"{found['step_ms'] / 1e3:.2f}",
            f"{found['predicted_ms'] / 1e3:.2f}", f"{found['step_over_predicted']:.3f}",
        ]  # fmt: skip
        print("| " + " | ".join(row) + " |", flush=True)


def hosts(args):
    """Steps of one model on 1, 2 and 4 hosts with a rank and a server each, whose links bind. The batch of a rank stays the same."""
    layers, link, steps = 16, 25_000_000, 5
    print("| ranks, servers | step s | what links alone take s | samples/s of a rank, against one host |")
    print("|---:|---:|---:|---:|")
    alone = None
    for count in (1, 2, 4):
        with Servers(args.programs, count, link, ["--memory", "2GiB"]) as servers:
            rank = [pathlib.Path(__file__).with_name("plan_rank.py"), servers.addresses(), layers, steps]
            torchrun = [args.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
            done = subprocess.run([str(part) for part in [*torchrun, *rank]], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        took = json.loads(done.stdout)["step_s"]
        alone = alone or took
        # Each link carries its server's part of the gradients in and of the weights out.
        least = 2 * 2 * layers * 1024**2 / count / link
        print(f"| {count} | {took:.2f} | {least:.2f} | {alone / took:.2f} |", flush=True)


def prefetch(args):
    """The part of stage 3's pulls that PyTorch's compute hides, behind a link that binds."""
    link = 100_000_000
    print("| compute of a use, of its transfer | delay | units | pulled | step s | of the transfer | waited for, of the pulls' time | hidden |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for compute, delay, units in ((1.5, 0, 48), (1.5, 0, 24), (1.5, 1, 24), (0.5, 0, 48), (0.5, 0, 24), (0.5, 1, 24)):
        with Servers(args.programs, 1, link, ["--memory", "4GiB"]) as servers:
            script = pathlib.Path(__file__).with_name("plan_units.py")
            command = [args.python, script, servers.addresses(), link, units, compute, delay]
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        found = json.loads(done.stdout)
        # Units that stay resident from forward to backward are pulled once.
        pulled = 2 * units - found["room"]
        transfer = pulled * found["unit_bytes"] / link
        waited = max(0.0, found["step_s"] - found["alone_s"])
        print(
            f"| {compute} | {delay} | {units} | {pulled} | {found['step_s']:.2f} | {found['step_s'] / transfer:.2f} | "
            f"{waited / transfer:.2f} | {1 - waited / transfer:.2f} |",
            flush=True,
        )


WHAT = {"links": links, "configurations": configurations, "hosts": hosts, "prefetch": prefetch}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(WHAT))
    parser.add_argument("--programs", type=pathlib.Path, default=pathlib.Path("target/release"))
    parser.add_argument("--only", nargs="+", help="only cases of these names")
    parser.add_argument("--state-dir", help="a folder of the drive that the nvme tier is measured on")
    parser.add_argument("--drives", type=float, help="GB/s of that drive, as `longshore plan --probe` says")
    parser.add_argument("--python", default=sys.executable, help="a Python that has Longshore's package, for hosts and prefetch")
    args = parser.parse_args()
    # SIGTERM removes servers and namespaces as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    WHAT[args.what](args)


if __name__ == "__main__":
    main()
