"""Other programs' files are read and written without a whole copy in memory. A separate process measures each."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import running

#: Bytes of weights. `LIMIT` is the most that a call may take beyond the process's own memory. The limit covers file
#: buffers, and sends to a server in another process. State takes three times the weights' bytes, so it must not be in
#: memory as a whole.
WEIGHTS = 64 << 20
LIMIT = 32 << 20
#: Memory that a command takes before it does anything.
OF_A_PROCESS = 10 << 20
PROGRAM = """
import json, sys, threading
import torch, longshore
from longshore import checkpoint

servers, folder = sys.argv[1:]


def own():
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


class Most(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.before = self.most = own()
        self.ended = threading.Event()
        self.start()

    def run(self):
        while not self.ended.wait(0.005):
            self.most = max(self.most, own())

    def end(self):
        self.ended.set()
        self.join()
        return max(self.most, own()) - self.before


def made(job):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    return model, longshore.AdamW(model.named_parameters(), servers=servers, job=job, transport="tcp")


def counted(name, act):
    most = Most()
    act()
    found[name] = most.end()


found = {}
model, optimizer = made("saved")
for parameter in model.parameters():
    parameter.grad = torch.full_like(parameter, 1e-3)
optimizer.step()
model.zero_grad()
for name, act in {
    "save_torch": lambda: checkpoint.save_torch(optimizer, folder + "/adamw.pt"),
    "save_deepspeed": lambda: checkpoint.save_deepspeed(optimizer, folder + "/universal"),
    "save_safetensors": lambda: checkpoint.save_safetensors(optimizer, folder + "/model", dtype="fp32"),
}.items():
    counted(name, act)
optimizer.close()
for name, load in {
    "load_deepspeed": lambda optimizer: checkpoint.load_deepspeed(optimizer, folder + "/universal"),
    "load_safetensors": lambda optimizer: checkpoint.load_safetensors(optimizer, folder + "/model"),
}.items():
    again, loading = made(name)

    def act():
        load(loading)
        loading.open()

    counted(name, act)
    assert all(map(torch.equal, model.parameters(), again.parameters())), name
    loading.close()
print("found", json.dumps(found))
"""


def most_of(command: list[str]) -> int:
    """Runs a command. Returns its peak memory beyond an idle process's."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    most = 0
    while process.poll() is None:
        with contextlib.suppress(ValueError, OSError):  # the process has ended
            [line] = [line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("RssAnon:")]
            most = max(most, int(line.split()[1]) << 10)
        time.sleep(0.005)
    assert process.stderr is not None
    assert process.returncode == 0, process.stderr.read()
    return most - OF_A_PROCESS


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_no_file_is_held_in_memory(tmp_path: Path) -> None:
    with running(memory="3GiB") as address:
        command = [sys.executable, "-c", PROGRAM, address, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        longshore, servers = [sys.executable, "-m", "longshore"], ["--servers", address]
        weights, new = str(tmp_path / "model"), ["--like", "saved", "--job", "imported"]
        commands = {
            "import": most_of([*longshore, "import", *servers, *new, "--from", weights]),
            "export": most_of([*longshore, "export", *servers, "--job", "imported", "--dtype", "f32", "--out", str(tmp_path / "out")]),
        }
    found = json.loads(done.stdout.rsplit("found ", 1)[1]) | commands
    files = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    print({name: f"{taken / (1 << 20):.1f} MiB" for name, taken in found.items()})
    assert files > 6 * WEIGHTS, "two moments, these with the weights, and the weights"
    assert all(taken < LIMIT for taken in found.values()), found
