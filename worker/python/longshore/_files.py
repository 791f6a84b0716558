"""Files that tensors are written into as they come, so that no process holds a whole model: torch's own format, mapped."""

import contextlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from longshore.errors import LongshoreError, invalid

#: What folders are called that are not whole.
DRAFTS = ".longshore-*"


def mapped(path: Path, content: Callable[[], Any]) -> Any:
    """Writes a file as ``torch.save`` does, but for the tensors' values, and maps it.

    Args:
        path: the file.
        content: makes what the file has. Its tensors take no memory.

    Returns:
        What the file has. Its tensors' memory is the file.

    Raises:
        LongshoreError: where there is no room.
    """
    with FakeTensorMode():
        described = content()
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(described, path)
    # A hole in a mapped file would end the process when the drive is full.
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise invalid(str(path), error.strerror, "with room for the tensors", "free space there", LongshoreError) from error
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return torch.load(path, mmap=True, weights_only=True)


def check_target(folder: Path) -> None:
    """Refuses to write over what is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise invalid(str(folder), "there, and not empty", "a new or empty folder", "name another one, or empty it")


@contextlib.contextmanager
def draft(folder: Path) -> Iterator[Path]:
    """A folder that takes its name once all of it is written, and on the drive."""
    check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=DRAFTS[:-1], dir=folder.parent))
    try:
        yield made
        for path in sorted(made.rglob("*"), reverse=True):
            _sync(path)
        made.chmod(0o755)
        os.replace(made, folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Does what :func:`replace` does, with a text."""
    replace(path, lambda draft: draft.write_text(text))


def replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Has a file written beside its place, and moves it there: whoever reads it finds what it had or all of this."""
    draft = path.with_name(f".{path.name}.draft")
    write(draft)
    _sync(draft)
    os.replace(draft, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def blank(shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
    """An fp32 tensor of a description."""
    return torch.empty(shape, dtype=torch.float32)
