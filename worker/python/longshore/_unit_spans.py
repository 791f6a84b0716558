"""Where elements of a unit's parameter lie in the job, and in the host's memory."""

from collections.abc import Callable, Iterable

from torch import Tensor

from longshore._host import Place
from longshore._params import DTYPES, Param
from longshore._units import Member

#: Where some elements of a parameter lie in the job: its parameter there, the first element in that, and how many.
Span = tuple[int, int, int]
#: The spans of a parameter's elements, from one on and so many.
Spans = Callable[[Param, int, int], Iterable[Span]]


def in_one_piece(param: Param, start: int, elements: int) -> Iterable[Span]:
    """The span of elements of a parameter that is one of the job, too."""
    return [(param.index, start, elements)]


def parts_of(spans: Spans, member: Member, elements: int) -> list[Span]:
    """Where a trained member lies in the job, whole."""
    assert member.param is not None
    return list(spans(member.param, 0, elements))


def places_of(spans: Spans, member: Member, memory: Tensor, start: int) -> list[tuple[Place, int]]:
    """Where elements of a member go, from one on, and where each run of them begins in its parameter of the job. The memory has no
    gaps. What is frozen lies there in one piece."""
    address, wire, size, found = memory.data_ptr(), DTYPES[memory.dtype], memory.element_size(), []
    if member.param is not None:
        of_job = spans(member.param, start, memory.numel())
    else:
        assert member.kept is not None
        of_job = in_one_piece(member.kept, start, memory.numel())
    for index, first, elements in of_job:
        found.append(((index, address, elements, wire), first))
        address += elements * size
    return found
