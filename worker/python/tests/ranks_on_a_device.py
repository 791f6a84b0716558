"""The simulated accelerator of accelerator.py among ranks, with late collectives.

A collective follows the work of its caller's stream, on a stream of its process group. A collective has two operations: the first reads
this rank's data and sends it to the others, and the second writes the result of all. A rank's device does no work for another rank until
that one waits. The waiting rank then asks for it; a real device would get there by itself.
"""

import collections
import functools
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from accelerator import Operation, Simulated, Stream, needs
from torch import Tensor, distributed

#: Key of a collective: number of the run, name of the process group, and number of the collective within the group.
Key = tuple[int, str, int]
#: Seconds after which a rank stops waiting for another rank's device.
DEADLINE = 60.0


class Mail:
    """Messages among ranks, through the process group's store. Messages arrive in order, on a separate thread."""

    def __init__(self) -> None:
        self.rank, self.world_size = distributed.get_rank(), distributed.get_world_size()
        self.others = [rank for rank in range(self.world_size) if rank != self.rank]
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A store that waits for a message blocks its other calls, so sending has a store of its own.
        self._out, self._in = (distributed.TCPStore(*place, is_master=False, timeout=timedelta(hours=1)) for _ in range(2))
        self._sending = threading.Lock()
        self._devices: dict[int, AmongRanks] = {}
        self._early: dict[int, list[tuple[Any, ...]]] = collections.defaultdict(list)
        self._arriving = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="mail", daemon=True)
        self._thread.start()

    def send(self, to: int, run: int, *message: Any) -> None:
        with self._sending:
            number = self._out.add(f"mail/{to}", 1)
            self._out.set(f"mail/{to}/{number}", pickle.dumps((run, message)))

    def add(self, run: int, device: "AmongRanks") -> None:
        """Gives a device the messages of its run."""
        with self._arriving:
            self._devices[run] = device
            for message in self._early.pop(run, []):
                device.take(*message)

    def _run(self) -> None:
        number = 0
        while True:
            number += 1
            run, message = pickle.loads(self._in.get(f"mail/{self.rank}/{number}"))
            if run < 0:
                return
            with self._arriving:
                if run in self._devices:
                    self._devices[run].take(*message)
                else:
                    self._early[run].append(message)

    def close(self) -> None:
        self.send(self.rank, -1)
        self._thread.join(DEADLINE)


class Work:
    """A collective's result, like torch.distributed's."""

    def __init__(self, device: "AmongRanks", done: Operation) -> None:
        self._device, self._done = device, done

    def wait(self) -> None:
        # The function of the package that waits for its collective.
        caller = sys._getframe(2).f_code.co_name
        if self._device.ignored != f"{caller}.collective":
            self._device.current_stream(torch.device("cpu")).waits.append(self._done)

    def is_completed(self) -> bool:
        return self._done.act is None


class AmongRanks(Simulated):
    """A rank's accelerator.

    Args:
        run: A number that all ranks' accelerators of one run share, and no others.
    """

    def __init__(self, mail: Mail, run: int, seed: int, ignored: str | None = None) -> None:
        super().__init__(seed, ignored)
        self._mail, self._run = mail, run
        # A rank that waits for another one blocks a thread, so other threads serve other ranks meanwhile.
        self.thread = ThreadPoolExecutor(16, "accelerator", lambda: torch.set_num_threads(1))
        self._news = threading.Condition(self.lock)
        self._groups: dict[str, Stream] = collections.defaultdict(Stream)
        self._counts: collections.Counter[str] = collections.Counter()
        #: The operation that sends this rank's part of each collective. The next three have received parts, requests to
        #: other ranks, and other ranks' requests.
        self._posts: dict[Key, Operation] = {}
        self._came: dict[Key, dict[int, Tensor]] = collections.defaultdict(dict)
        self._asked: set[Key] = set()
        self._wanted: set[Key] = set()
        #: The collective whose parts each operation needs.
        self._takes: dict[Operation, Key] = {}
        mail.add(run, self)

    def all_gather(self, whole: Tensor, own: Tensor, group: Any) -> Work:
        target = self.alias(whole)
        return self._collective(own, group, lambda parts: target.copy_(torch.cat(parts).view(target.shape)))

    def reduce_scatter(self, part: Tensor, slots: Tensor) -> Work:
        target = self.alias(part)
        return self._collective(slots, None, lambda parts: target.copy_(_sum(parts)[self._mail.rank]))

    def all_reduce(self, tensor: Tensor) -> Work:
        target = self.alias(tensor)
        return self._collective(tensor, None, lambda parts: target.copy_(_sum(parts)))

    def _collective(self, own: Tensor, group: Any, finish: Callable[[Sequence[Tensor]], object]) -> Work:
        name = (group or distributed.group.WORLD).group_name
        with self.lock:
            self._counts[name] += 1
            key, stream = (self._run, name, self._counts[name]), self._groups[name]
            stream.waits += self.record(self.current_stream(own.device))
            self.give(stream, functools.partial(self._post, key, self.alias(own)))
            assert stream.last is not None
            self._posts[key] = stream.last
            self.give(stream, lambda: finish([part for _, part in sorted(self._came.pop(key).items())]))
            self._takes[stream.last] = key
            if key in self._wanted:
                self.thread.submit(self._do_for_another, key)
            return Work(self, stream.last)

    def _post(self, key: Key, own: Tensor) -> None:
        part = self._came[key][self._mail.rank] = own.clone()
        for rank in self._mail.others:
            self._mail.send(rank, self._run, "part", key, self._mail.rank, part)

    def take(self, kind: str, key: Key, *more: Any) -> None:
        """Takes a message of another rank's accelerator."""
        with self.lock:
            if kind == "part":
                rank, part = more
                self._came[key][rank] = part
                self._news.notify_all()
            elif key in self._posts:
                self.thread.submit(self._do_for_another, key)
            else:
                self._wanted.add(key)

    def _do_for_another(self, key: Key) -> None:
        """Advances as far as another rank's device needs."""
        try:
            with self.lock:
                self._all(needs([self._posts[key]]))
        except BaseException:
            traceback.print_exc()

    def _is_ready(self, operation: Operation) -> bool:
        key = self._takes.get(operation)
        return key is None or len(self._came[key]) == self._mail.world_size

    def _wait_for_others(self, left: list[Operation]) -> None:
        keys = {self._takes[operation] for operation in left if operation in self._takes and not self._is_ready(operation)}
        for key in keys - self._asked:
            self._asked.add(key)
            for rank in self._mail.others:
                self._mail.send(rank, self._run, "wanted", key)
        assert self._news.wait(DEADLINE), f"rank {self._mail.rank} waits for another one's part of {keys}"


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Sums in the order of ranks."""
    return functools.reduce(torch.add, parts)
