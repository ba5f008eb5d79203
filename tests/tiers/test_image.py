"""A part's file: anyone can read it, and its header has one size."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from disk_parts import BLOCK, address, open_tier
from safetensors import safe_open

from onekv.errors import OneKVError
from onekv.memory.pool.blocks import Tensor
from onekv.tiers.base import Address
from onekv.tiers.image import DTYPES, Image

TENSORS = [Tensor(f"layers.{i}.{dtype}", (2, 3, i + 1), dtype) for i, dtype in enumerate(DTYPES)]


def make_file(folder: Path) -> tuple[Path, bytes, Address]:
    image = Image(TENSORS, BLOCK)
    where = address(7, tokens=5)
    data = bytes(np.random.default_rng(0).integers(0, 2, image.data_size, np.uint8))
    path = folder / "part.safetensors"
    path.write_bytes(image.header("0" * 32, where) + data)
    assert path.stat().st_size == image.size
    return path, data, where


def test_mlx_reads_every_dtype(tmp_path):
    path, data, _ = make_file(tmp_path)
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    assert {name: (a.shape, a.dtype) for name, a in arrays.items()} == {t.name: (t.shape, t.dtype) for t in TENSORS}
    read = b"".join(np.frombuffer(memoryview(arrays[t.name]), np.uint8).tobytes() for t in TENSORS)
    assert read == data


def test_safetensors_reads_it_with_its_metadata(tmp_path):
    path, data, where = make_file(tmp_path)
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == {tensor.name for tensor in TENSORS}
        metadata = file.metadata()
        # numpy has no bfloat16.
        plain = [tensor for tensor in TENSORS if tensor.dtype != mx.bfloat16]
        arrays = {tensor.name: file.get_tensor(tensor.name) for tensor in plain}
    assert bytes.fromhex(metadata["key"]) == where.key
    assert bytes.fromhex(metadata["parent"]) == where.parent
    assert bytes.fromhex(metadata["tokens"]) == where.tokens
    assert int(metadata["start"]) == where.start
    start = 0
    for tensor in TENSORS:
        if tensor in plain:
            assert arrays[tensor.name].tobytes() == data[start : start + tensor.nbytes]
        start += tensor.nbytes


def test_header_has_one_size_and_data_are_aligned():
    image = Image(TENSORS, BLOCK)
    short = Address(b"", b"", 0, b"")
    full = Address(b"k" * 32, b"p" * 32, 2**40, b"\xff" * 4 * BLOCK)
    assert len(image.header("0" * 32, short)) == len(image.header("f" * 32, full)) == image.header_size
    assert image.header_size % 64 == 0


def test_more_tokens_than_a_block_has_are_refused():
    with pytest.raises(OneKVError, match="1152 tokens"):
        Image(TENSORS[:1], 1).header("0" * 32, address(0, tokens=18 * BLOCK * 4))


def test_file_of_the_tier_is_what_the_image_says(tmp_path):
    image = Image(TENSORS, BLOCK)
    tier = open_tier(tmp_path / "cache", images={0: image})
    where = address(1)
    data = bytes(np.random.default_rng(1).integers(0, 2, image.data_size, np.uint8))
    assert tier.offer(where, 0, lambda view: view.__setitem__(slice(None), data))
    tier.close()
    (path,) = (tmp_path / "cache").glob("*/*/*.safetensors")
    assert path.read_bytes()[image.header_size :] == data
    assert set(mx.load(str(path))) == {tensor.name for tensor in TENSORS}
