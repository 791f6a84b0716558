"""Everything that wants a GPU, in one command of at most eight minutes: ``python benchmarks/gpu.py --out FOLDER``.

Each part is a process with a time limit. A part that fails or ends late is reported, and the others go on. The folder gets ``gpu.json`` with all
figures, ``gpu.md`` with one table, a log by part, and traces for https://ui.perfetto.dev. The installed package is measured; its servers run in
processes beside. A host without a GPU runs the same code on its CPU.
"""

import argparse
import collections
import contextlib
import gzip
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Sums then have a fixed order where a part asks for it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from peer_ways import BASE, Gpt, model_of, ours, server
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

import longshore
from longshore.transfer import device as _device
from longshore.transfer.pinned import host_tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DELAYED = f"{BASE}, delay=1"
#: Time limits in seconds: of each part, in the order of the parts, and of all together.
LIMITS = {
    "links": 40,
    "update": 30,
    "tensors": 25,
    "small": 40,
    "large": 80,
    "trace": 60,
    "largest": 110,
    "largest_delayed": 110,
    "stage_3": 60,
    "tests": 120,
    "offloaded": 90,
    "threads": 45,
}
WHOLE = 475


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts: parameters, sequences and tokens of a sequence by training step."""

    small: tuple[int, int, int] = (25_000_000, 8, 256)
    large: tuple[int, int, int] = (800_000_000, 16, 1024)
    #: Width, layers, words, sequences and tokens of the largest model, and of the model at stage 3.
    largest: tuple[int, int, int, int, int] = (4096, 35, 32_000, 8, 2048)
    stage_3: tuple[int, int, int, int, int] = (2048, 24, 16_000, 8, 1024)
    link_bytes: int = 512 << 20
    update: str = "50M"
    tensors: int = 400
    rounds: int = 3


#: A rehearsal on a CPU.
TINY = Sizes((500_000, 2, 16), (600_000, 2, 16), (64, 2, 256, 2, 16), (64, 9, 256, 2, 16), 4 << 20, "2M", 40, 1)
SIZES = Sizes()


def _synchronize() -> None:
    if DEVICE.type != "cpu":
        torch.accelerator.synchronize()


def _median(act: Callable[[], Any], rounds: int = 7, unmeasured: int = 2) -> float:
    """Returns the seconds of a call, with the device's work."""
    taken = []
    for _ in range(unmeasured + rounds):
        _synchronize()
        start = time.perf_counter()
        act()
        _synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[unmeasured:])


def _found(out: Path, part: str) -> dict[str, Any]:
    """Returns the figures of an earlier part; none if it failed."""
    path = out / f"{part}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


# Parts


def tests(out: Path) -> dict[str, Any]:
    folder = Path(__file__).resolve().parent.parent / "worker/python/tests"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(out / "tests.xml")]
    files = ["test_gpu.py", "test_gpu_units.py", "test_locked_memory.py"]
    done = subprocess.run([*command, *(str(folder / name) for name in files)], text=True, capture_output=True, cwd=out, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:])
    return {"passed": done.returncode == 0, "summary": done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""}


def links(_: Path) -> dict[str, Any]:
    """Returns GB/s of copies between the device and page-locked memory: torch's, the job's arena, and the server's images."""
    accelerator = _device.accelerator
    streams = [accelerator.new_stream(DEVICE) for _ in range(2)]
    on_device = [torch.zeros(SIZES.link_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2)]

    def speed(out: list[Tensor], back: list[Tensor]) -> float:
        """Returns GB/s to the host's memory ``out``, and from ``back`` at the same time."""

        def act() -> None:
            for target, part in zip(out, on_device[0].split([target.nbytes for target in out] + [rest_out]), strict=False):
                accelerator.copy(target, part, streams[0])
            for source, part in zip(back, on_device[1].split([source.nbytes for source in back] + [rest_back]), strict=False):
                accelerator.copy(part, source, streams[1])

        rest_out, rest_back = (SIZES.link_bytes - sum(part.nbytes for part in parts) for parts in (out, back))
        return sum(part.nbytes for part in [*out, *back]) / _median(act) / 1e9

    host = [accelerator.locked([SIZES.link_bytes], torch.uint8) for _ in range(2)]
    found: dict[str, Any] = {"to host": speed(host[:1], []), "to device": speed([], host[1:]), "both": speed(host[:1], host[1:])}
    with server() as address:
        parameter = nn.Parameter(torch.zeros(SIZES.link_bytes // 2, dtype=torch.bfloat16, device=DEVICE))
        optimizer = ours([("weight", parameter)], BASE, "links", address)
        for _ in range(2):
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        optimizer.flush()
        job: Any = optimizer._connection.job  # type: ignore[union-attr]
        memory = job.gradient_memory()
        arena = _host(memory.pieces(0))
        images = _host([(image.address, image.nbytes) for image in job.image_memory()])
        found |= {"to the arena": speed(arena, []), "from the server": speed([], images), "arena and server": speed(arena, images)}
        # The arena has no gradients any more: nothing sends from it.
        optimizer.close()
    return found


def _host(pieces: list[tuple[int, int]]) -> list[Tensor]:
    """Returns pieces of memory, together at most as large as the copies."""
    found, room = [], SIZES.link_bytes
    for address, nbytes in pieces:
        if room:
            found.append(host_tensor(address, min(nbytes, room), torch.uint8))
            room -= found[-1].nbytes
    return found


def update(_: Path) -> dict[str, Any]:
    """Returns nanoseconds of the servers' update a parameter on all threads, by format of the state."""
    flags = ["--params", SIZES.update, "--rounds", "3", "--filter", "adamw/bf16", "--json"]
    done = subprocess.run([sys.executable, "-m", "longshore", "bench", "update", *flags], text=True, capture_output=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    threads = max(row["threads"] for row in rows)
    found: dict[str, Any] = {"threads": threads}
    for row in rows:
        kind, *formats = row["case"].split("/")[2:]
        if row["threads"] == threads and kind != "scalar":
            name = "/".join(formats) or "fp32"
            found[name] = min(row["ns_per_param"], found.get(name, row["ns_per_param"]))
    return found


def _compute(model: nn.Module, tokens: Tensor, rounds: int = 5) -> dict[str, Any]:
    """Returns seconds of forward, and of forward and backward, without an optimizer; and the model's counts."""

    def backward() -> None:
        model(tokens).backward()
        model.zero_grad(set_to_none=True)

    parameters = list(model.parameters())
    with torch.no_grad():
        forward = _median(lambda: model(tokens), rounds)
        uses = _uses(model, tokens)
    return {
        "forward": forward,
        "uses": uses,
        "forward and backward": _median(backward, rounds),
        "parameters": sum(tensor.numel() for tensor in parameters),
        "tensors": len(parameters),
        "largest": max(tensor.numel() for tensor in parameters),
        "tokens": tokens.shape[0] * (tokens.shape[1] - 1),
    }


def _uses(model: nn.Module, tokens: Tensor) -> list[list[float]]:
    """Returns for each module with parameters that forward calls: the number of elements up to its last parameter, in the model's order,
    and the seconds of forward before its first call."""
    until, elements = {}, 0
    for parameter in model.parameters():
        elements += parameter.numel()
        until[parameter] = elements
    called: dict[nn.Module, Any] = {}

    def now() -> Any:
        if DEVICE.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def before(module: nn.Module, _: Any) -> None:
        if module not in called:
            called[module] = now()

    hooks = [module.register_forward_pre_hook(before) for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    _synchronize()
    start = now()
    model(tokens)
    _synchronize()
    for hook in hooks:
        hook.remove()
    passed = (lambda at: at - start) if DEVICE.type == "cpu" else (lambda at: start.elapsed_time(at) / 1e3)
    return [[max(until[parameter] for parameter in module.parameters(recurse=False)), passed(at)] for module, at in called.items()]


def _steps(size: tuple[int, int, int], ways: str, in_a_row: int) -> dict[str, Any]:
    import peers

    elements, batch, length = size
    times = peers.peers(0, elements, 0, batch, length, SIZES.rounds, ways, device=DEVICE.type, in_a_row=in_a_row)
    model = model_of(elements, length, DEVICE)
    tokens = torch.randint(model.words.num_embeddings, (batch, length + 1), device=DEVICE)
    return {"seconds": {name.removeprefix("training: "): statistics.median(taken) for name, taken in times.items()}, **_compute(model, tokens)}


#: Words of the names of the compared ways. Each of Longshore's ways fills 24 bytes of server memory a parameter before
#: its first step.
_WAYS = "shared memory,alone,nothing offloaded,torchao"


def small(_: Path) -> dict[str, Any]:
    return _steps(SIZES.small, _WAYS, 4)


def large(_: Path) -> dict[str, Any]:
    return _steps(SIZES.large, _WAYS, 4)


def offloaded(_: Path) -> dict[str, Any]:
    """Returns the steps of slower peers. DeepSpeed may compile its optimizer first."""
    return _steps(SIZES.large, "shared memory,deepspeed engine,torch fused, with casts", 2)


class _Training:
    """Steps of a model with this package, whose phases have names in a trace."""

    def __init__(self, model: Gpt, batch: int, length: int, address: str, name: str, budget: int | None = None, **options: Any) -> None:
        self.model: Any = model
        self.losses: list[float] = []
        self._shape, self._words = (batch, length + 1), model.words.num_embeddings
        self._generator = torch.Generator().manual_seed(0)
        self.optimizer = ours(list(model.named_parameters()), BASE, name, address, streaming=True, **options)
        self.sharded = None if budget is None else longshore.shard(model, self.optimizer, budget, device=DEVICE)
        self.optimizer.open()

    def step(self) -> None:
        tokens = torch.randint(self._words, self._shape, generator=self._generator).to(DEVICE)
        with record_function("forward"):
            loss = self.model(tokens)
        with record_function("backward"):
            loss.backward()
        with record_function("step"):
            self.optimizer.step()
        with record_function("wait"):
            self.losses.append(loss.item())

    def weights(self) -> list[Tensor]:
        """Returns the last weights in the host's memory."""
        self.optimizer.flush()
        found = []
        for parameter in self.model.parameters():
            with longshore.GatheredParameters(parameter) if self.sharded is not None else contextlib.nullcontext():
                found.append(parameter.detach().cpu().clone())
        return found


@contextlib.contextmanager
def _training(*given: Any, server_flags: Iterable[str] = (), **options: Any) -> Iterator[_Training]:
    model, batch, length = given
    with server(*server_flags) as address:
        training = _Training(model, batch, length, address, "job", **options)
        yield training
        training.optimizer.close()


def trace(out: Path) -> dict[str, Any]:
    """Writes traces of exact and delayed steps of both models, and of exact steps at stage 3. Returns the seconds of a step by phase and by
    the device's work."""
    found = {}
    for size, delay in (("large", 0), ("large", 1), ("small", 0), ("small", 1), ("stage_3", 0)):
        *_, batch, length = getattr(SIZES, size)
        options: dict[str, Any] = {"delay": delay, **({"warmup_steps": 0} if delay else {})}
        if size == "stage_3":
            model = _gpt(SIZES.stage_3).to("cpu")
            options["budget"] = sum(parameter.nbytes for parameter in model.parameters()) // 4
        else:
            model = model_of(getattr(SIZES, size)[0], length, DEVICE)
        with _training(model, batch, length, **options) as training:
            for _ in range(3):
                training.step()
            _synchronize()
            with torch.profiler.profile() as profile, record_function("steps"):
                for _ in range(2):
                    training.step()
        path = out / f"trace-{size}-{'delayed' if delay else 'exact'}.json.gz"
        profile.export_chrome_trace(str(path))
        with gzip.open(path) as file:
            shares = shares_of(json.load(file)["traceEvents"], "steps")
        found[f"{size}, {'delayed' if delay else 'exact'}"] = {name: seconds / 2 for name, seconds in shares.items()}
    return found


_PHASES = ("forward", "backward", "step", "wait")
_WORK = {"kernel": "computing", "out": "copying to the host", "in": "copying to the device"}


def shares_of(events: list[dict[str, Any]], within: str) -> dict[str, float]:
    """Returns the seconds of a named span in a trace, by the host's phase and the device's work. Work that computing hides does not
    count."""
    edges: list[tuple[float, int, str]] = []
    span = (0.0, 0.0)
    for event in events:
        if event.get("ph") != "X":
            continue
        start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        kind, name = event.get("cat"), event.get("name", "")
        if kind == "user_annotation" and name == within:
            span = start, end
        elif kind == "user_annotation" and name in _PHASES:
            edges += [(start, 1, name), (end, -1, name)]
        elif kind == "kernel":
            edges += [(start, 1, "kernel"), (end, -1, "kernel")]
        elif kind == "gpu_memcpy" and ("DtoH" in name or "HtoD" in name):
            way = "out" if "DtoH" in name else "in"
            edges += [(start, 1, way), (end, -1, way)]
    seconds: dict[str, float] = collections.defaultdict(float)
    running: collections.Counter[str] = collections.Counter()
    before = span[0]
    for at, change, name in [*sorted(edges), (span[1], 0, "")]:
        until = min(max(at, before), span[1])
        phase = next((phase for phase in _PHASES if running[phase]), "between")
        work = next((words for key, words in _WORK.items() if running[key]), "nothing on the device")
        seconds[f"{phase}: {work}"] += (until - before) * 1e-6
        before = until
        running[name] += change
    return {name: taken for name, taken in seconds.items() if taken > 0}


def tensors(_: Path) -> dict[str, Any]:
    """Returns milliseconds of the interpreter a tensor: CPU time of Python's threads in a step of small gradients, by mode."""
    from overhead import overhead

    where = "cuda" if DEVICE.type == "cuda" else "simulated"
    return {mode: overhead(SIZES.tensors, 20, streaming=mode == "streaming", where=where) * 1e3 / SIZES.tensors for mode in ("streaming", "safe")}


class _Recomputed(nn.Module):
    """A layer whose inside backward computes again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, **given: Any) -> Any:
        return checkpoint(self.layer, hidden, use_reentrant=False, **given)


def _gpt(size: tuple[int, int, int, int, int]) -> Gpt:
    """Returns a model with random bf16 weights, constructed on the device."""
    width, depth, words, _, length = size
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model = Gpt(width, depth, words, length)
    torch.set_default_dtype(torch.float32)
    return model


def largest(out: Path) -> dict[str, Any]:
    return _largest_model(out, delay=0, state="bf16")


def largest_delayed(out: Path) -> dict[str, Any]:
    # With fp32 master weights, a second gradient in flight is too much for 128 GiB.
    return _largest_model(out, delay=1, warmup_steps=0, state="bf16", master="bf16")


def _largest_model(out: Path, delay: int, state: str, master: str = "fp32", **options: Any) -> dict[str, Any]:
    width, depth, words, batch, length = size = SIZES.largest
    model = _gpt(size)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    # A rehearsal has room for one layer's activations.
    memory = torch.cuda.get_device_properties(DEVICE).total_memory if DEVICE.type == "cuda" else 1_300_000
    # Two images and the gradients; logits with their gradients; activations. Activations take 34 bytes for each token,
    # element of the width, and layer.
    room = 0.75 * memory - 3 * weights - 16 * batch * length * words
    kept = max(0, min(depth, int(room / (34 * batch * length * width))))
    model.layers = nn.ModuleList(layer if place < kept else _Recomputed(layer) for place, layer in enumerate(model.layers))
    tokens = torch.randint(words, (batch, length + 1), device=DEVICE)
    found = {**_compute(model, tokens, 3), "layers that keep activations": kept, "state": state, "master": master}
    formats = ["--state", state, "--master", master, "--delay", str(delay), *(["--keep-activations"] if kept == depth else [])]
    flags = ["--params", str(found["parameters"]), "--sequences", str(batch), "--context", str(length), "--gpu-memory", str(memory)]
    found["plan"] = plan = _plan(out, [*flags, *formats], _tflops(found, "forward and backward") * (1 if kept == depth else 4 / 3))
    print(plan["words"], flush=True)
    limit = ["--memory", str(plan["memory_bytes"] + (1 << 30))] if "memory_bytes" in plan else []
    with _training(model, batch, length, server_flags=limit, delay=delay, state=state, master=master, **options) as training:
        found["seconds"] = {DELAYED if delay else BASE: _median(training.step, 4)}
        report = training.optimizer.last_report
        found["last step"] = {} if report is None else {"wall_s": report.wall_s, "exposed_s": report.exposed_s}
    return found


def _tflops(found: dict[str, Any], what: str) -> float:
    """Returns 10^12 operations a second, six for each parameter and token."""
    seconds: float = found.get(what) or found["seconds"][what]
    return 6e-12 * found["parameters"] * found["tokens"] / seconds


def _plan(out: Path, flags: list[str], tflops: float) -> dict[str, Any]:
    """Returns `longshore plan` of a model on this host, as far as earlier parts have measured it: its figures, and its words."""
    link, rate = _found(out, "links"), _found(out, "update").get("fp32")
    if "to device" in link and rate:
        # The update moves 28 bytes a parameter.
        speeds = {"gpu-tflops": tflops, "link": min(link["to device"], link["to host"]), "server-memory": 28 / rate}
        flags = [*flags, *(word for name, speed in speeds.items() for word in (f"--{name}", f"{speed:.4g}"))]
    command = [sys.executable, "-m", "longshore", "plan", *flags]
    words, figures = (subprocess.run([*command, *more], text=True, capture_output=True, check=False) for more in ([], ["--json"]))
    # A model that does not fit is an error, with figures. Steps are measured without any.
    planned = json.loads(figures.stdout) if figures.stdout else {"gpus": {"stages": []}}
    return {**planned, "words": words.stdout + words.stderr, "command": " ".join(["longshore", *command[3:]])}


def stage_3(out: Path) -> dict[str, Any]:
    """Trains a model at stage 2, and at stage 3 with a quarter of its weights as budget, by turns. Both compute with a fixed order of
    sums."""
    torch.use_deterministic_algorithms(True)
    for others in (torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.enable_mem_efficient_sdp):
        others(False)  # with cuDNN's attention both stages had other bits, and the other kernel is not deterministic by default
    torch.utils.deterministic.fill_uninitialized_memory = False
    _, _, _, batch, length = size = SIZES.stage_3
    model = _gpt(size)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    compute = _compute(model, torch.randint(model.words.num_embeddings, (batch, length + 1), device=DEVICE), 3)
    with server() as address:
        whole = _Training(model, batch, length, address, "stage-2")
        parts = _Training(_gpt(size).to("cpu"), batch, length, address, "stage-3", budget=weights // 4)
        seconds: dict[str, list[float]] = {"stage 2": [], "stage 3": []}
        for _ in range(SIZES.rounds):
            for name, training in (("stage 2", whole), ("stage 3", parts)):
                seconds[name].append(_median(training.step, 3, 1))
        same = whole.losses == parts.losses and all(map(torch.equal, whole.weights(), parts.weights()))
        peak = parts.sharded.peak_weight_bytes if parts.sharded else 0
        for training in (whole, parts):
            training.optimizer.close()
    # At stage 3 the plan keeps weights in the part of the memory that gradients and activations leave free.
    flags = ["--params", str(compute["parameters"]), "--sequences", str(batch), "--context", str(length), "--keep-activations"]
    plan = _plan(out, flags, _tflops(compute, "forward and backward"))
    least = sum(stage["gradient_bytes"] + stage["activation_bytes"] for stage in plan["gpus"]["stages"] if stage["stage"] == 3)
    plan = _plan(out, [*flags, "--gpu-memory", str(int(least + weights // 4))], _tflops(compute, "forward and backward"))
    planned = {f"stage {stage['stage']}": stage["step_s"] for stage in plan["gpus"]["stages"]}
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    return {**compute, "seconds": medians, "same bits": same, "peak bytes": peak, "weight bytes": weights, "planned": planned}


def threads(_: Path) -> dict[str, Any]:
    """Returns the seconds of an exact step for some numbers of the server's update threads."""
    elements, batch, length = SIZES.large
    found = {}
    most = len(os.sched_getaffinity(0))
    for count in sorted({max(1, most // 4), max(1, most // 2), most}):
        with _training(model_of(elements, length, DEVICE), batch, length, server_flags=["--threads", str(count)]) as training:
            found[str(count)] = _median(training.step, 4)
    return {"seconds": found}


PARTS: dict[str, Callable[[Path], Any]] = {
    part.__name__: part for part in (links, update, tensors, small, large, trace, largest, largest_delayed, stage_3, tests, offloaded, threads)
}

# Results

#: Parts of steps whose floor is known.
_STEPS = ("small", "large", "offloaded", "largest", "largest_delayed")


def floors_of(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the least time of a step for each case, from measured pieces. An exact step has backward, the copies of the largest tensor, and a
    forward that waits for each module's weights. A delayed step takes the longest of computing, the update and the copies."""
    made: dict[str, dict[str, float]] = {}
    link, rates = found.get("links", {}), found.get("update", {})
    out, back = (link.get(better, link.get(plain)) for better, plain in (("to the arena", "to host"), ("from the server", "to device")))
    for part in _STEPS:
        steps = found.get(part, {})
        kind = "/".join(f"{key}-{steps[key]}" for key in ("state", "master") if steps.get(key, "fp32") != "fp32") or "fp32"
        if "forward" not in steps or not rates.get(kind) or not out or not back:
            continue
        update = steps["parameters"] * rates[kind] * 1e-9
        unit = 2 * steps["largest"] * (1 / out + 1 / back) * 1e-9
        whole, forward = steps["forward and backward"], steps["forward"]
        copies = 2 * steps["parameters"] / min(out, back) * 1e-9
        waits = (elements / steps["parameters"] * update + forward - before for elements, before in steps["uses"])
        for name, floor in ((BASE, whole - forward + max(forward, *waits) + unit), (DELAYED, max(whole, update, copies))):
            if name in steps["seconds"]:
                made[f"{part}: {name}"] = {"floor": floor, "update": update, "copies": copies, "above": steps["seconds"][name] / floor}
    return made


def goals_of(found: dict[str, Any], floors: dict[str, dict[str, float]]) -> list[tuple[str, float | None, float, bool | None]]:
    """Returns the goals: what is measured, its figure, the most it may be, and whether it is; None where a figure is missing."""

    def ratio(part: str, name: str, other: str) -> float | None:
        steps = found.get(part, {})
        mine, theirs = steps.get("seconds", {}).get(name), steps.get("seconds", {}).get(other, steps.get(other))
        return mine / theirs if mine and theirs else None

    alone = "forward and backward alone"
    rows = [
        ("0.8 B exact, of its floor", floors.get(f"large: {BASE}", {}).get("above"), 1.07),
        ("0.8 B exact, of torchao", ratio("large", BASE, "torchao CPUOffloadOptimizer"), 1.05),
        ("0.8 B delayed, of forward and backward", ratio("large", DELAYED, alone), 1.03),
        ("25 M delayed, of forward and backward", ratio("small", DELAYED, alone), 1.3),
        ("25 M exact, of forward and backward", ratio("small", BASE, alone), 1.6),
        ("stage 3 with a quarter of the weights, of stage 2", ratio("stage_3", "stage 3", "stage 2"), 1.15),
        ("interpreter, ms a tensor", found.get("tensors", {}).get("streaming"), 0.03),
    ]
    return [(name, value, most, None if value is None else value <= most) for name, value, most in rows]


def table_of(found: dict[str, Any]) -> str:
    """Returns all steps and goals as Markdown."""
    floors = found["floors"]
    lines = ["| step | ms | floor ms | above the floor | of forward and backward | tokens/s | TFLOPS |", "|---|---:|---:|---:|---:|---:|---:|"]
    for part in (*_STEPS, "stage_3"):
        steps = found.get(part, {})
        for name, seconds in steps.get("seconds", {}).items():
            floor = floors.get(f"{part}: {name}")
            bound = f"{floor['floor'] * 1e3:.1f} | {floor['above']:.3f}" if floor else " | "
            beside = seconds / steps["forward and backward"]
            speed = f"{steps['tokens'] / seconds:,.0f} | {_tflops(steps, name):.1f}"
            lines.append(f"| {part}: {name} | {seconds * 1e3:.1f} | {bound} | {beside:.2f} | {speed} |")
    lines += ["", "| goal | measured | at most | |", "|---|---:|---:|---|"]
    for name, value, most, held in found["goals"]:
        lines.append(f"| {name} | {'' if value is None else f'{value:.3f}'} | {most} | {'not measured' if held is None else 'yes' if held else 'NO'} |")
    shares = found.get("trace", {})
    lines += ["", "| step | phase and the device's work | ms |", "|---|---|---:|"]
    for step, taken in shares.items():
        if isinstance(taken, dict):
            lines += [f"| {step} | {name} | {seconds * 1e3:.1f} |" for name, seconds in taken.items()]
    for part, figures in found.items():
        if isinstance(figures, dict) and "plan" in figures:
            lines += [f"\n{part}, the plan before: `{figures['plan']['command']}`", "", "```", figures["plan"]["words"].rstrip(), "```"]
        if isinstance(figures, dict) and "failed" in figures:
            lines.append(f"\n{part} FAILED: {figures['failed']}")
    return "\n".join(lines) + "\n"


def _run(name: str, out: Path, limit: float, more: list[str]) -> dict[str, Any]:
    """Runs a part as a process, and returns its figures or why there are none."""
    result = out / f"{name}.json"
    result.unlink(missing_ok=True)
    start = time.perf_counter()
    with (out / f"{name}.log").open("w") as log:
        command = [sys.executable, __file__, "--only", name, "--out", str(out), *more]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            why = f"exit status {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            why = f"no end within {limit:.0f} s"
        # Servers that the part started end with its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    taken = {"took": time.perf_counter() - start}
    return {**_found(out, name), **taken} if result.exists() else {"failed": f"{why}: {name}.log says more", **taken}


def main() -> None:
    global SIZES
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of results (default gpu)")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, in this order (default all)")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="tiny models, to rehearse on a host without a GPU")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.tiny:
        SIZES = TINY
    if args.only:
        if DEVICE.type == "cpu":
            from overhead import OnHost

            _device.accelerator = OnHost([])
            torch.set_num_threads(1)
        (out / f"{args.only}.json").write_text(json.dumps(PARTS[args.only](out)))
        return
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    found: dict[str, Any] = {"device": name, "cores": os.cpu_count(), "NUMA nodes": nodes, "torch": torch.__version__}
    deadline = time.monotonic() + WHOLE
    for part in args.parts.split(","):
        found[part] = _run(part, out, max(1.0, min(LIMITS[part], deadline - time.monotonic())), ["--tiny"] if args.tiny else [])
        print(part, json.dumps(found[part]), flush=True)
        found["floors"] = floors_of(found)
        found["goals"] = goals_of(found, found["floors"])
        (out / "gpu.json").write_text(json.dumps(found, indent=1))
        (out / "gpu.md").write_text(table_of(found))
    print((out / "gpu.md").read_text())


if __name__ == "__main__":
    main()
