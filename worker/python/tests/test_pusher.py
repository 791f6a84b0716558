"""Background copies from a device are bounded by their memory."""

import threading

from longshore.transfer.gradients import Group, Pusher


class Held:
    """A job whose pushes wait until they are released."""

    def __init__(self) -> None:
        self.may_go = threading.Semaphore(0)
        self.pushed: list[int] = []

    def begin_step(self) -> None:
        pass

    def push(self, places: list[tuple[int, int, int, str]], scale: float) -> None:
        assert self.may_go.acquire(timeout=30)
        self.pushed.append(places[0][0])


def of_40_bytes(index: int) -> Group:
    group = Group()
    group.places.append((index, 0, 10, "fp32"))
    group.nbytes = 40
    return group


def test_gradients_wait_for_room() -> None:
    job = Held()
    pusher = Pusher(job)
    pusher.wait_for_room(1000, 40)  # a single push goes through, however large
    for index in range(2):
        pusher.wait_for_room(40, 80)
        pusher.push(of_40_bytes(index))
    went: list[int] = []

    def third() -> None:
        pusher.wait_for_room(40, 80)
        went.append(len(job.pushed))

    waiting = threading.Thread(target=third)
    waiting.start()
    assert not went, "two of 40 bytes are on their way"
    job.may_go.release()
    waiting.join(30)
    assert went == [1], "the first has gone, and the second not"
    job.may_go.release()
    pusher.wait()
    assert job.pushed == [0, 1]
    pusher.close()
