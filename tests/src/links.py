"""Links between network namespaces, with a rate, a delay, random loss, and cuts of one way.

`tests/src/links.rs` starts this relay. Each host is a network namespace with one TUN device. The namespaces have no name: the end of this
process ends them. Packets of every host come here, wait for their turn and their delay, and leave by the other host's device.

usage: links.py HOSTS SEED. The first line of stdout has a path of each namespace, or `cannot` and the reason. Commands on stdin, each answered
by a line: `rate BYTES`, `delay SECONDS`, `loss FRACTION`, `cut FROM TO`, `mend FROM TO`.
"""

import collections
import contextlib
import ctypes
import fcntl
import os
import pathlib
import random
import select
import struct
import subprocess
import sys
import time

# With packets of 9000 bytes, Python's loop keeps up with 25 MB/s.
MTU = 9000
# Seconds. A packet that would wait longer for the link is dropped, as a router drops it.
LONGEST_TURN = 0.1
PACKETS_AT_ONCE = 64
CLONE_NEWNET, TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x40000000, 0x400454CA, 0x0001, 0x1000


class Link:
    """Packets from one host to another."""

    def __init__(self):
        self.is_cut = False
        self.free_at = 0.0
        self.packets = collections.deque()


def host(number):
    """Returns the namespace and the device of a new host, 10.77.0.1 for number 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no namespace of the network can be made")
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN | IFF_NO_PI))
    for line in (
        "link set lo up",
        f"address add 10.77.0.{number + 1}/24 dev wire",
        f"link set dev wire mtu {MTU} txqueuelen 1000 up",
    ):
        subprocess.run(["ip", *line.split()], check=True, capture_output=True)
    return namespace, device


class Relay:
    def __init__(self, devices, seed):
        self.devices = devices
        self.random = random.Random(seed)
        self.links = {(a, b): Link() for a in range(len(devices)) for b in range(len(devices)) if a != b}
        self.rate, self.delay, self.loss = 1e12, 0.0, 0.0

    def take(self, sender):
        """Takes packets from a host."""
        for _ in range(PACKETS_AT_ONCE):
            try:
                packet = os.read(self.devices[sender], MTU)
            except BlockingIOError:
                return
            # Byte 19 of an IPv4 header is the last of the destination's address.
            link = self.links.get((sender, packet[19] - 1)) if packet[0] >> 4 == 4 else None
            now = time.monotonic()
            if link is None or link.is_cut or link.free_at > now + LONGEST_TURN:
                continue
            link.free_at = max(link.free_at, now) + len(packet) / self.rate
            # A lost packet has used the link's time as well.
            if self.random.random() >= self.loss:
                link.packets.append((link.free_at + self.delay, packet))

    def give(self, receiver, link):
        """Gives a host the packets that are due. Returns the time of the next one."""
        while link.packets:
            due, packet = link.packets[0]
            if due > time.monotonic():
                return due
            link.packets.popleft()
            with contextlib.suppress(BlockingIOError):
                os.write(self.devices[receiver], packet)
        return None

    def obey(self, line):
        word, *rest = line.split()
        if word in ("rate", "delay", "loss"):
            setattr(self, word, float(rest[0]))
            return "done"
        link = self.links[int(rest[0]), int(rest[1])]
        link.is_cut = {"cut": True, "mend": False}[word]
        return "done"

    def run(self):
        poll = select.epoll()
        for device in (0, *self.devices):
            poll.register(device, select.EPOLLIN)
        hosts = {device: number for number, device in enumerate(self.devices)}
        while True:
            due = [self.give(receiver, link) for (_, receiver), link in self.links.items()]
            next_due = min((time for time in due if time is not None), default=None)
            timeout = -1 if next_due is None else max(0.0, next_due - time.monotonic())
            for ready, _ in poll.poll(timeout):
                if ready in hosts:
                    self.take(hosts[ready])
                    continue
                lines = os.read(0, 65536).decode()
                if not lines:
                    return
                for line in lines.splitlines():
                    print(self.obey(line), flush=True)


def main():
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    try:
        hosts = [host(number) for number in range(count)]
    except (OSError, subprocess.CalledProcessError) as error:
        print("cannot", getattr(error, "stderr", None) or error, flush=True)
        return
    # The relay gets a high priority, so that a busy machine does not slow the links. The kernel shares processors
    # between sessions first, so the session gets the priority too.
    os.setsid()
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/autogroup").write_text("-15")
        os.nice(-15)
    print(*(f"/proc/{os.getpid()}/fd/{namespace}" for namespace, _ in hosts), flush=True)
    Relay([device for _, device in hosts], seed).run()


main()
