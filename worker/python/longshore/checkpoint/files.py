"""Files of tensors: torch's own format and Hugging Face's safetensors, read and written as mapped memory.

Tensors are read and written one by one, so that no process holds a whole model. A file under its final name is always whole.
"""

import contextlib
import json
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

from longshore.errors import LongshoreError, StateError, invalid
from longshore.transfer.params import DTYPES, Param, check_tensor

#: Pattern of the temporary names that folders have until they are complete.
DRAFTS = ".longshore-*"


def mapped(path: Path, content: Callable[[], Any]) -> Any:
    """Writes a file as ``torch.save`` does, without the tensors' values, and maps it.

    Args:
        content: returns the file's content, whose tensors take no memory.

    Returns:
        The file's content. The tensors' memory is the file.

    Raises:
        LongshoreError: if the drive is full.
    """
    with FakeTensorMode():
        described = content()
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(described, path)
    # The file gets all its blocks now. With a full drive, a later write to a hole in the mapping would kill the
    # process.
    with path.open("r+b") as file:
        _allocate(path, file.fileno(), os.fstat(file.fileno()).st_size, "tensors")
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return torch.load(path, mmap=True, weights_only=True, map_location="cpu")


def _allocate(path: Path, file: int, nbytes: int, what: str) -> None:
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        raise invalid(str(path), error.strerror, f"with room for the {what}", "free space there", LongshoreError) from error


@contextlib.contextmanager
def draft(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder that takes its final name once everything in it is written and synced."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise invalid(str(folder), "there, and not empty", "a new or empty folder", "name another one, or empty it")
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


def replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a draft in the file's folder, and renames it to the file. Readers find the old file or the whole new one."""
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
    """Returns an fp32 tensor whose values do not matter, for the content given to :func:`mapped`."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


_INDEX = "model.safetensors.index.json"
_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
#: Largest header of a file in bytes. The safetensors library has the same limit.
_MAX_HEADER = 100_000_000


class Files:
    """The tensors of a file or of a folder's files, by name. Only the tensor being read is mapped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, tuple[Path, int, int, str, torch.Size]] = {}
        for file in _files_of(path):
            self._read_header(file)

    def _read_header(self, file: Path) -> None:
        def broken(what: str) -> LongshoreError:
            return invalid(str(file), what, "a safetensors file", "fetch it again", StateError)

        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise broken(f"of {size} bytes with a header of {length}")
            try:
                header = json.loads(opened.read(length))
                entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
                for name, entry in entries.items():
                    start, end = entry["data_offsets"]
                    place = (file, 8 + length + start, end - start, entry["dtype"], torch.Size(entry["shape"]))
                    if not 0 <= start <= end <= size - 8 - length:
                        raise broken(f"too short for {name}")
                    self._found[name] = place
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise broken(f"not readable ({error})") from error

    def names(self) -> list[str]:
        """Returns the names of all tensors."""
        return list(self._found)

    def check(self, name: str, shape: torch.Size) -> None:
        """Refuses a tensor that cannot be a parameter's weights, without reading it."""
        if name not in self._found:
            remedy = "name the optimizer's parameters as the files do (model.named_parameters()), or take the files of this model"
            raise invalid(name, "absent", f"in {self._path}", remedy, StateError)
        _, _, length, kind, found = self._found[name]
        dtype = _TYPES.get(kind)
        if dtype not in DTYPES:
            raise invalid(name, kind, "fp32, bf16 or fp16", "convert the files", StateError)
        if found.numel() * dtype.itemsize != length:
            raise invalid(name, f"{length} bytes", f"those of {list(found)}", "fetch the file again", StateError)
        check_tensor(name, torch.empty(found, dtype=dtype, device="meta"), shape, str(self._path), described=True)

    def tensor(self, name: str) -> Tensor:
        """Returns the tensor over the file's mapped memory."""
        file, start, length, kind, shape = self._found[name]
        whole: Any = torch.UntypedStorage.from_file(str(file), False, start + length)
        dtype = _TYPES[kind]
        if start % dtype.itemsize:
            # Other programs may write unaligned tensors, which torch cannot use in place, so this one is copied.
            return torch.frombuffer(bytearray(bytes(whole[start:])), dtype=dtype).view(shape)
        return torch.empty(0, dtype=dtype, device="cpu").set_(whole, start // dtype.itemsize, (shape.numel(),), (1,)).view(shape)


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / _INDEX
    if index.is_file():
        names = _names_in(index)
        for name in names:
            if not (path / name).is_file():
                raise invalid(str(path / name), "absent", f"there, as {_INDEX} says", "fetch it", StateError)
        return [path / name for name in names]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    limit = "a safetensors file, or a folder with model.safetensors or an index"
    raise invalid("path", str(path), limit, "name the model's files", StateError)


def _names_in(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a file's name is no text")
        if any(name != Path(name).name for name in names):
            # A downloaded index must not make this process read files outside of the folder.
            raise ValueError("it names a file outside of its folder")
        return names
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"not readable ({type(error).__name__}: {error})"
        raise invalid(str(index), what, "an index with a weight_map of files", "fetch it again", StateError) from error


def create(folder: Path, named: dict[str, Tensor | Param], dtype: str, most: int) -> dict[str, Tensor]:
    """Writes headers and given tensors. Returns mapped tensors of parameters, for the caller to fill."""
    kind = {name: dtype for dtype, name in DTYPES.items()}[dtype]
    described = {
        name: (kind if isinstance(given, Param) else given.dtype, given.shape) for name, given in named.items()
    }
    for name, (found, _) in described.items():
        if found not in _NAMES:
            raise invalid(name, found, "a type that safetensors has", "convert it, or leave model= out")
    files: list[list[str]] = [[]]
    taken = 0
    for name, (found, shape) in described.items():
        size = shape.numel() * found.itemsize
        if taken + size > most and files[-1]:
            files.append([])
            taken = 0
        files[-1].append(name)
        taken += size
    written: dict[str, Tensor] = {}
    weight_map, total = {}, 0
    for number, names in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        total += _create(folder / file, {name: described[name] for name in names}, named, written)
        weight_map.update(dict.fromkeys(names, file))
    if len(files) > 1:
        index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return written


def _create(
    path: Path, described: dict[str, tuple[torch.dtype, torch.Size]], named: dict[str, Tensor | Param], written: dict[str, Tensor]
) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Wide types come first, so that every tensor is aligned.
    order = sorted(described, key=lambda name: -described[name][0].itemsize)
    for name in order:
        dtype, shape = described[name]
        start, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    with path.open("w+b") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        _allocate(path, file.fileno(), data + end, "weights")
        memory = mmap.mmap(file.fileno(), data + end)
    for name in order:
        dtype, shape = described[name]
        start = data + header[name]["data_offsets"][0]
        given = named[name]
        if shape.numel() == 0:
            continue
        target = torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=start).view(shape)
        if isinstance(given, Tensor):
            target.copy_(given)
        else:
            written[name] = target
    return end
