"""The order in which units are used: learned in one step, looked up in the next."""

from bisect import bisect_right
from collections.abc import Iterator

from longshore._units import Unit

#: How far a unit is that is not used any more, as far as one can know.
_NEVER = 1 << 40


class Order:
    """Where the step in hand is in the order of the step before."""

    def __init__(self) -> None:
        self._learned: list[Unit] = []
        self._places: dict[Unit, list[int]] = {}
        self._seen: list[Unit] = []
        self._at = -1
        #: Where the step was before uses that do not count; None where there were none since.
        self._was_at: int | None = None
        #: The unit that was used last, and whether that counted.
        self._last: tuple[Unit, bool] | None = None
        #: By unit: when it was used last, in uses.
        self._used: dict[Unit, int] = {}
        self._clock = 0

    def note(self, unit: Unit, *, counts: bool) -> bool:
        """A unit is used. One that does not count, as in an evaluation, is not learned, and the step goes on from where it was.

        Returns:
            Whether another one was used before. Several modules of a unit run one after the other.
        """
        self._clock += 1
        self._used[unit] = self._clock
        if self._last == (unit, counts):
            return False
        self._last = unit, counts
        if not counts and self._was_at is None:
            self._was_at = self._at
        elif counts and self._was_at is not None:
            self._at, self._was_at = self._was_at, None
        if counts and self._seen and self._seen[-1] is unit:
            return True
        if counts:
            self._seen.append(unit)
        places = self._places.get(unit, ())
        after = bisect_right(places, self._at)
        if after < len(places):
            self._at = places[after]
        elif places:
            # As the next batch of an evaluation begins, or one more micro-step than the step before had.
            self._at = places[0]
        return True

    def end(self) -> None:
        """A step has ended."""
        if self._seen:
            self._learned, self._seen = self._seen, []
            self._places = {}
            for place, unit in enumerate(self._learned):
                self._places.setdefault(unit, []).append(place)
        self._at, self._was_at, self._last = -1, None, None

    def distance(self, unit: Unit) -> int:
        """How many other uses come before the unit's next one. Of those that are not used any more in this step, the one that was
        used last is nearest."""
        places = self._places.get(unit, ())
        after = bisect_right(places, self._at)
        if after < len(places):
            return places[after] - self._at
        return _NEVER + self._clock - self._used.get(unit, 0)

    def upcoming(self, most: int) -> Iterator[Unit]:
        """The units that are used next."""
        yield from self._learned[self._at + 1 : self._at + 1 + most]
