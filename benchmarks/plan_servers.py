"""Servers for benchmarks/plan.py, each in a network namespace of its own behind a link that the kernel shapes each way."""

import contextlib
import pathlib
import re
import socket
import subprocess
import sys
import time

PORT = 7070


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Servers:
    """``count`` servers, each behind a link of `link` bytes a second, or unlimited."""

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
