"""The header of a GGUF file: metadata and where each tensor lies, checked before anything is read.

    magic version | tensor count, metadata count | metadata ... | tensor infos ... | pad | data ...

Every length and count in the file is checked against the bytes that are left, so a damaged file
ends in ModelFormatError, never in a crash or a large allocation.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelFormatError

# Name, elements per block, bytes per block: the types whose values are known exactly.
_SUPPORTED = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
}
_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
SUPPORTED_TYPES = tuple(name for name, _, _ in _SUPPORTED.values())

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
            11: "<q", 12: "<d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_ARRAY_DEPTH = 4
_MAX_DIMS = 4
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `shape` in row-major order (rows first), its bytes at [start, start + nbytes) of
    the file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says of itself. Arrays of numbers are numpy arrays, arrays of strings are
    lists.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GGUFHeader:
    """The header of the GGUF file at `path`.

    Raises ModelFormatError, naming the file and what is wrong, when the file is not GGUF, is
    truncated or damaged, or holds a tensor of a type outside SUPPORTED_TYPES.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except ValueError as error:  # mmap of an empty file
        raise ModelFormatError(f"{path} is empty; download it again") from error
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error.strerror}") from error


class _Reader:
    """Reads forward through `data`; `pos` never passes its end."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.size = len(data)
        self.pos = 0

    def fail(self, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path} is not a valid GGUF file: {what}")

    def take(self, count: int, what: str) -> int:
        """Moves past `count` bytes and returns where they start."""
        start = self.pos
        if count > self.size - start:
            raise self.fail(f"it ends inside {what} (byte {self.size}); download it again")
        self.pos = start + count
        return start

    def number(self, fmt: str, what: str) -> Any:
        return struct.unpack_from(fmt, self.data, self.take(struct.calcsize(fmt), what))[0]

    def string(self, what: str) -> str:
        length = self.number("<Q", what)
        start = self.take(length, what)
        return self.data[start : start + length].decode("utf-8", "replace")

    def header(self) -> GGUFHeader:
        start = self.take(4, "the magic number")
        if self.data[start : start + 4] != b"GGUF":
            raise self.fail("it does not start with GGUF")
        version = self.number("<I", "the version")
        if version not in (2, 3):
            kind = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
            raise self.fail(f"{kind} files are not supported, only little-endian versions 2 and 3")
        tensor_count = self.number("<Q", "the tensor count")
        metadata_count = self.number("<Q", "the metadata count")
        self.check_count(metadata_count, _MIN_METADATA_BYTES, "metadata entries")
        metadata: dict[str, Any] = {}
        for index in range(metadata_count):
            key = self.string(f"metadata entry {index}")
            if key in metadata:
                raise self.fail(f"metadata {key!r} occurs twice")
            metadata[key] = self.value(self.number("<I", key), key)
        self.check_count(tensor_count, _MIN_TENSOR_BYTES, "tensors")
        raw = [self.tensor_info(f"the info of tensor {index}") for index in range(tensor_count)]
        return GGUFHeader(self.path, metadata, self.place(raw, metadata))

    def check_count(self, count: int, least: int, what: str) -> None:
        if count * least > self.size - self.pos:
            raise self.fail(f"it claims {count} {what}, more than its {self.size} bytes can hold")

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            return self.array(key, depth)
        raise self.fail(f"metadata {key!r} has the unknown value type {kind}")

    def array(self, key: str, depth: int) -> Any:
        kind = self.number("<I", key)
        count = self.number("<Q", key)
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            start = self.take(count * dtype.itemsize, key)
            # A copy: the mapping is closed when the header has been read.
            return np.frombuffer(self.data, dtype, count, start).copy()
        if kind == _STRING:
            self.check_count(count, 8, f"strings in {key!r}")
            return self.strings(count, key)
        self.check_count(count, 12, f"arrays in {key!r}")
        return [self.value(kind, key, depth + 1) for _ in range(count)]

    def strings(self, count: int, key: str) -> list[str]:
        """`string` in a loop, written out because vocabularies have 100,000s of them."""
        data, size, pos = self.data, self.size, self.pos
        unpack = struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            end = pos + 8
            if end <= size:
                pos, end = end, end + unpack(data, pos)[0]
            if end > size:
                raise self.fail(f"it ends inside {key} (byte {size}); download it again")
            found.append(data[pos:end].decode("utf-8", "replace"))
            pos = end
        self.pos = pos
        return found

    def tensor_info(self, what: str) -> tuple[str, str, tuple[int, ...], int, int]:
        """Name, type, shape, bytes, and offset from the start of the data."""
        name = self.string(what)
        dims = self.number("<I", what)
        if not 1 <= dims <= _MAX_DIMS:
            raise self.fail(f"tensor {name!r} has {dims} dimensions")
        # The file lists the fastest dimension first.
        shape = tuple(reversed([self.number("<Q", what) for _ in range(dims)]))
        type_id = self.number("<I", what)
        offset = self.number("<Q", what)
        if type_id not in _SUPPORTED:
            known = _OTHER_TYPES.get(type_id, f"number {type_id}")
            raise ModelFormatError(
                f"{self.path}: tensor {name!r} has type {known}; OneKV reads "
                f"{', '.join(SUPPORTED_TYPES)} (choose a Q8_0 or Q4_0 file of this model)"
            )
        type_name, block, block_bytes = _SUPPORTED[type_id]
        if 0 in shape or shape[-1] % block:
            raise self.fail(f"tensor {name!r} of type {type_name} cannot have shape {shape}")
        count = 1
        for dim in shape:
            count *= dim
        return name, type_name, shape, count // block * block_bytes, offset

    def place(
        self, raw: list[tuple[str, str, tuple[int, ...], int, int]], metadata: dict[str, Any]
    ) -> dict[str, TensorInfo]:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise self.fail(f"general.alignment is {alignment}")
        base = -(-self.pos // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, type_name, shape, nbytes, offset in raw:
            start = base + offset
            if name in tensors:
                raise self.fail(f"tensor {name!r} occurs twice")
            if offset % alignment or start + nbytes > self.size:
                raise self.fail(
                    f"tensor {name!r} lies at [{start}, {start + nbytes}) of {self.size} bytes; download it again"
                )
            tensors[name] = TensorInfo(name, type_name, shape, start, nbytes)
        return tensors
