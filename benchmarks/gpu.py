"""Everything that wants a GPU, in one command: ``python benchmarks/gpu.py --out FOLDER``.

Each part is a process with a time limit. A part that fails or ends late is reported, and the others go on. The folder gets ``gpu.json`` with all
figures, a log by part, and a trace of two steps for https://ui.perfetto.dev. The installed package is measured; its servers run in processes beside.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Seconds of a part.
LIMITS = {"tests": 240, "links": 40, "update": 60, "small": 60, "large": 170, "trace": 60, "tensors": 40}
#: Parameters, sequences and tokens of the training steps.
MODELS = {"small": (25_000_000, 8, 256), "large": (800_000_000, 16, 1024)}
_DEVICE = torch.device("cuda")
_BASE = "longshore, shared memory"


def _median(act: Callable[[], Any], rounds: int = 7) -> float:
    """Returns the seconds of a call, with the device's work."""
    taken = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        act()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def tests(out: Path) -> dict[str, Any]:
    folder = Path(__file__).resolve().parent.parent / "worker/python/tests"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(out / "tests.xml")]
    files = ["test_gpu.py", "test_gpu_units.py", "test_locked_memory.py"]
    done = subprocess.run([*command, *(str(folder / name) for name in files)], text=True, capture_output=True, cwd=out, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:])
    return {"passed": done.returncode == 0, "summary": done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""}


def links(_: Path) -> dict[str, float]:
    """Returns GB/s of copies between page-locked memory and the device."""
    nbytes = 512 << 20
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(nbytes, dtype=torch.uint8, device=_DEVICE) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy(way: int) -> None:
        with torch.cuda.stream(streams[way]):
            (host[0] if way == 0 else device[1]).copy_(device[0] if way == 0 else host[1], non_blocking=True)

    def both() -> None:
        copy(0)
        copy(1)

    alone = {name: nbytes / _median(lambda way=way: copy(way)) / 1e9 for way, name in enumerate(("to host", "to device"))}
    return {**alone, "both": 2 * nbytes / _median(both) / 1e9}


def update(_: Path) -> dict[str, float]:
    """Returns nanoseconds of the servers' update a parameter, on all threads."""
    command = [sys.executable, "-m", "longshore", "bench", "update", "--params", "100M", "--rounds", "3", "--filter", "adamw/bf16", "--json"]
    rows = [json.loads(line) for line in subprocess.run(command, text=True, capture_output=True, check=True).stdout.splitlines()]
    threads = max(row["threads"] for row in rows)
    plain = [row["ns_per_param"] for row in rows if row["threads"] == threads and row["case"].count("/") == 2 and "scalar" not in row["case"]]
    return {"ns_per_param": min(plain), "threads": threads}


def _steps(size: str) -> dict[str, Any]:
    import peers
    from peer_ways import model_of

    elements, batch, length = MODELS[size]
    # Words of the ways' names. Each of ours fills 24 bytes a parameter of the servers' memory before its first step.
    ways = "shared memory,alone,nothing offloaded,torchao,deepspeed engine"
    times = peers.peers(0, elements, 0, batch, length, 3, ways, device="cuda", in_a_row=4)
    model = model_of(elements, length, _DEVICE)
    tokens = torch.randint(model.words.num_embeddings, (batch, length + 1), device=_DEVICE)

    def backward() -> None:
        model(tokens).backward()
        model.zero_grad(set_to_none=True)

    found = {name.removeprefix("training: "): statistics.median(taken) for name, taken in times.items()}
    with torch.no_grad():
        forward = _median(lambda: model(tokens))
    parameters = list(model.parameters())
    return {
        "seconds": found,
        "forward": forward,
        "forward and backward": _median(backward),
        "parameters": sum(tensor.numel() for tensor in parameters),
        "tensors": len(parameters),
        "largest": max(tensor.numel() for tensor in parameters),
    }


def small(_: Path) -> dict[str, Any]:
    return _steps("small")


def large(_: Path) -> dict[str, Any]:
    return _steps("large")


def trace(out: Path) -> dict[str, Any]:
    """Writes a trace of an exact and of a delayed step."""
    from peer_ways import server, training_steps

    elements, batch, length = MODELS["small"]
    with server() as address:
        ways = training_steps(elements, batch, length, _BASE, address, _DEVICE)
        for step in ways.steps.values():
            for _ in range(3):
                step()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for name, step in ways.steps.items():
                with torch.profiler.record_function(name):
                    step()
                    step()
        ways.close()
    profile.export_chrome_trace(str(out / "trace.json.gz"))
    return {"bytes": (out / "trace.json.gz").stat().st_size}


def tensors(_: Path) -> dict[str, float]:
    """Returns milliseconds of the interpreter a tensor: CPU time of all Python threads, in steps of small gradients on the device."""
    import longshore

    count = 400
    params = [(f"layer{index}", torch.nn.Parameter(torch.zeros(1024, device=_DEVICE))) for index in range(count)]
    optimizer = longshore.AdamW(params, lr=1e-4, streaming=True)

    def step() -> None:
        loss = torch.zeros((), device=_DEVICE)
        for _, parameter in params:
            loss = loss + parameter.sum()
        loss.backward()
        optimizer.step()

    def plain() -> None:
        loss = torch.zeros((), device=_DEVICE)
        for tensor in alone:
            loss = loss + tensor.sum()
        loss.backward()

    alone: list[Tensor] = [torch.nn.Parameter(torch.zeros(1024, device=_DEVICE)) for _ in range(count)]
    found = {"step": _median(step, 20), "forward and backward": _median(plain, 20)}
    optimizer.close()
    return {**found, "ms a tensor": (found["step"] - found["forward and backward"]) * 1e3 / count}


PARTS: dict[str, Callable[[Path], Any]] = {
    part.__name__: part for part in (links, update, small, large, tensors, trace, tests)
}


def _floors(found: dict[str, Any]) -> dict[str, Any]:
    """Returns a step's floors from measured pieces: exact is backward, then the longer of update and forward, then the first weights' copy."""
    made = {}
    for size in MODELS:
        steps = found.get(size, {})
        if "forward" not in steps or "ns_per_param" not in found.get("update", {}) or "to device" not in found.get("links", {}):
            continue
        slow = steps["parameters"] * found["update"]["ns_per_param"] * 1e-9
        unit = 2 * steps["largest"] * (1 / found["links"]["to device"] + 1 / found["links"]["to host"]) * 1e-9
        whole, forward = steps["forward and backward"], steps["forward"]
        copies = 2 * steps["parameters"] / min(found["links"]["to device"], found["links"]["to host"]) * 1e-9
        floors = {_BASE: whole - forward + max(slow, forward) + unit, f"{_BASE}, delay=1": max(whole, slow, copies)}
        made[size] = {
            name: {"floor": floor, "seconds": steps["seconds"].get(name), "above": steps["seconds"].get(name, 0) / floor}
            for name, floor in floors.items()
        }
    return made


def _run(name: str, out: Path) -> dict[str, Any]:
    """Runs a part as a process, and returns its figures or why there are none."""
    result = out / f"{name}.json"
    start = time.perf_counter()
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen([sys.executable, __file__, "--only", name, "--out", str(out)], stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(LIMITS[name])
            why = f"exit status {status}"
        except subprocess.TimeoutExpired:
            why = f"no end within {LIMITS[name]} s"
        # Servers that the part started end with its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    taken = time.perf_counter() - start
    if result.exists():
        return {**json.loads(result.read_text()), "took": taken}
    return {"failed": f"{why}: {name}.log says more", "took": taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of results (default gpu)")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, in this order (default all)")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only:
        made = PARTS[args.only](args.out.resolve())
        (args.out / f"{args.only}.json").write_text(json.dumps(made))
        return
    found = {"device": torch.cuda.get_device_name(), "cores": os.cpu_count(), "torch": torch.__version__}
    for name in args.parts.split(","):
        found[name] = _run(name, args.out.resolve())
        print(name, json.dumps(found[name]), flush=True)
        (args.out / "gpu.json").write_text(json.dumps(found, indent=1))
    found["floors"] = _floors(found)
    (args.out / "gpu.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found["floors"], indent=1))


if __name__ == "__main__":
    main()
