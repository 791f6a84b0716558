"""Arrays of any framework as host memory: addresses for the Rust half.

Arrays of NumPy, and arrays that export DLPack from the host's memory, are used in place. Any other array is converted to NumPy.
"""

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from longshore.errors import GradientError, LongshoreError, invalid

#: The Rust half's name of each type of NumPy. NumPy has bfloat16 only with ml_dtypes.
_NUMPY = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
#: The Rust half's name of each type of DLPack, which is a pair of type code and bits.
_DLPACK = {(2, 32): "fp32", (2, 16): "fp16", (4, 16): "bf16"}
# DLPack's device types in host memory: plain (1), page-locked for CUDA (3), page-locked for ROCm (11).
_HOST_DEVICES = {1, 3, 11}
_READ_ONLY = 1


class _Tensor(ctypes.Structure):
    """DLPack's structure DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLPack's structure DLManagedTensorVersioned. The structure used before DLPack 1 begins with the tensor
    instead."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


@dataclass(frozen=True, slots=True)
class HostArray:
    """Elements end to end in the host's memory, in the order of the shape."""

    shape: tuple[int, ...]
    #: The type's name for the Rust half.
    wire: str
    address: int
    #: The owner of the memory.
    owner: Any

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def readable(name: str, value: Any) -> HostArray:
    """Returns an array's memory, or a copy's.

    Raises:
        InvalidError: naming the array, if the array is not on the host, or of a type that no server keeps.
    """
    if not isinstance(value, np.ndarray):
        if _is_negated(value):
            value = value.resolve_neg()
        found = _of_dlpack(name, value, writable=False)
        if found is not None:
            return found
    try:
        array = np.ascontiguousarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as why:
        remedy = f"copy it to the host first ({why})"
        raise invalid(name, type(value).__name__, "an array in the host's memory", remedy) from why
    return _of_numpy(name, array, value)


def writable(name: str, value: Any) -> HostArray:
    """Returns an array's own memory.

    Raises:
        InvalidError: naming the array, if the array cannot be written in place.
    """
    if isinstance(value, np.ndarray):
        if not value.flags.writeable or not value.flags.c_contiguous:
            raise _cannot_write(name, "read-only" if not value.flags.writeable else "with gaps")
        return _of_numpy(name, value, value)
    if _is_negated(value):
        raise _cannot_write(name, "lazily negated")
    found = _of_dlpack(name, value, writable=True)
    if found is None:
        raise _cannot_write(name, type(value).__name__)
    return found


def _is_negated(value: Any) -> bool:
    """Returns whether a torch tensor's values are the negatives of its memory, which torch's DLPack export ignores."""
    return bool(hasattr(value, "is_neg") and value.is_neg())


def empty(shape: tuple[int, ...], wire: str) -> np.ndarray[Any, Any]:
    """Returns a new array of a shape and type.

    Raises:
        InvalidError: for bf16, if NumPy has no such type.
    """
    if wire != "bf16":
        return np.empty(shape, np.float32 if wire == "fp32" else np.float16)
    try:
        import ml_dtypes
    except ImportError:
        remedy = "install ml_dtypes, which gives NumPy that type; or pass dtype='fp32', or arrays of yours as out="
        raise invalid("dtype", "bf16", "fp32 or fp16, which NumPy has", remedy) from None
    return np.empty(shape, ml_dtypes.bfloat16)


def _of_numpy(name: str, array: np.ndarray[Any, Any], given: Any) -> HostArray:
    wire = _NUMPY.get(array.dtype.name)
    if wire is None or not array.dtype.isnative:
        raise _type_error(name, array.dtype)
    # The shape is the given value's, since `ascontiguousarray` turns a scalar into an array of shape (1,).
    return HostArray(tuple(np.shape(given)), wire, array.ctypes.data, array)


def _of_dlpack(name: str, value: Any, writable: bool) -> HostArray | None:
    """Returns the host memory that an array exports by DLPack; None without such an export, or with gaps between elements."""
    if not hasattr(value, "__dlpack__"):
        return None
    if hasattr(value, "block_until_ready"):
        # JAX computes asynchronously: the array's values may not exist yet.
        value.block_until_ready()
    try:
        if int(value.__dlpack_device__()[0]) not in _HOST_DEVICES:
            return None
        capsule, is_versioned = _export(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as why:
        if hasattr(value, "__array__") and not writable and not hasattr(value, "requires_grad"):
            return None
        raise invalid(name, type(value).__name__, "an array that DLPack can export", str(why)) from why
    address = _pointer(capsule, b"dltensor_versioned" if is_versioned else b"dltensor")
    if is_versioned:
        managed = _Versioned.from_address(address)
        if managed.major != 1:
            return None
        tensor, is_read_only = managed.tensor, bool(managed.flags & _READ_ONLY)
    else:
        tensor, is_read_only = _Tensor.from_address(address), not writable
    if writable and (is_read_only or not _is_gapless(tensor)):
        raise _cannot_write(name, "read-only" if is_read_only else "with gaps")
    if not _is_gapless(tensor):
        return None
    wire = _DLPACK.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if wire is None:
        raise _type_error(name, getattr(value, "dtype", (tensor.code, tensor.bits)))
    # The capsule becomes the owner: its end frees the exported memory.
    return HostArray(tuple(tensor.shape[: tensor.ndim]), wire, (tensor.data or 0) + tensor.byte_offset, capsule)


def _export(value: Any) -> tuple[Any, bool]:
    try:
        capsule = value.__dlpack__(max_version=(1, 0))
    except TypeError:
        # Exporters from before DLPack 1 take no max_version.
        capsule = value.__dlpack__()
    return capsule, bool(_is_valid(capsule, b"dltensor_versioned"))


def _is_gapless(tensor: _Tensor) -> bool:
    if not tensor.strides:
        return True
    stride = 1
    for axis in reversed(range(tensor.ndim)):
        if tensor.shape[axis] != 1 and tensor.strides[axis] != stride:
            return False
        stride *= tensor.shape[axis]
    return True


def _type_error(name: str, dtype: object) -> LongshoreError:
    return invalid(name, dtype, "fp32, bf16 or fp16", "convert it, or leave it to another optimizer")


def _cannot_write(name: str, what: str) -> LongshoreError:
    remedy = "give a writable NumPy array or DLPack tensor without gaps, or take what pull returns"
    return invalid(name, what, "memory of the host that can be written to", remedy)


def check_like(name: str, given: HostArray, shape: tuple[int, ...]) -> None:
    """Refuses an array of another shape."""
    if given.shape != shape:
        limit = f"{list(shape)}, as when the job was opened"
        raise invalid(name, list(given.shape), limit, "give the parameter's own", GradientError)
