"""What a part's file looks like: a safetensors file that `mx.load` and `safetensors` read.

    | length, 8 bytes | header: JSON, padded with spaces | data: tensors one after the other, C order |
    0                 8                                  header_size (a multiple of 64)               size

The header's size depends on the kind of part alone, not on which part it is, so a buffer of `size` bytes can be filled
with data before its header is known. `__metadata__` holds what the index knows of the part, as strings.
"""

import json
from collections.abc import Sequence

import mlx.core as mx

from ..errors import OneKVError
from ..memory.layout import Layout
from ..memory.pool.blocks import Tensor, block_tensors, state_tensors
from .base import STATES, Address

FORMAT = "1"
ALIGNMENT = 64
# Keys are hashes of at most this many bytes.
KEY_BYTES = 32
TOKEN_BYTES = 4

# Those that MLX reads from such files: all it has but float64.
DTYPES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.uint64: "U64",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
    mx.complex64: "C64",
}


class Image:
    """The layout of all files of one kind of part: those of one group, or recurrent states."""

    def __init__(self, tensors: Sequence[Tensor], block_tokens: int) -> None:
        self.tensors = tuple(tensors)
        self._entries = json.dumps(_entries(self.tensors), separators=(",", ":"))[1:]
        self.data_size = sum(tensor.nbytes for tensor in self.tensors)
        key = bytes(KEY_BYTES)
        longest = self._json("0" * 32, Address(key, key, 2**63 - 1, bytes(block_tokens * TOKEN_BYTES)))
        self.header_size = -(-(8 + len(longest)) // ALIGNMENT) * ALIGNMENT
        self.size = self.header_size + self.data_size

    def header(self, model: str, address: Address) -> bytes:
        """The first `header_size` bytes of the file of this part; `model` is the hash that names its folder."""
        text = self._json(model, address)
        length = self.header_size - 8
        if len(text) > length:
            raise OneKVError(f"a block of {len(address.tokens) // TOKEN_BYTES} tokens is longer than a block can be")
        return length.to_bytes(8, "little") + text.ljust(length)

    def _json(self, model: str, address: Address) -> bytes:
        metadata = {
            "format": FORMAT,
            "model": model,
            "key": address.key.hex(),
            "parent": address.parent.hex(),
            "start": str(address.start),
            "tokens": address.tokens.hex(),
        }
        return f'{{"__metadata__":{json.dumps(metadata)},{self._entries}'.encode()


def images_of(layout: Layout, block_size: int) -> dict[int, Image]:
    """The kinds of parts that a model has: one per group, and its recurrent states."""
    images = {part: Image(block_tensors(group, block_size), block_size) for part, group in enumerate(layout.groups)}
    if layout.states:
        images[STATES] = Image(state_tensors(layout), block_size)
    return images


def _entries(tensors: Sequence[Tensor]) -> dict[str, object]:
    if not tensors:
        raise OneKVError("a block without tensors cannot be stored")
    entries: dict[str, object] = {}
    start = 0
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise OneKVError(f"{tensor.name} is {tensor.dtype}, which cannot be stored on disk")
        end = start + tensor.nbytes
        entries[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    if len(entries) < len(tensors):
        raise OneKVError("two tensors of a block have the same name")
    return entries
