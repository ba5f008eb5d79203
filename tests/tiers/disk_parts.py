"""Parts for tests of the disk tier: a part's content follows from its name."""

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import onekv  # noqa: F401  (before MLX, which links its matrix products when it is loaded)

# isort: split
import mlx.core as mx

from onekv.memory.pool.blocks import Tensor
from onekv.tiers.base import STATES, Address, Target
from onekv.tiers.disk import DiskTier
from onekv.tiers.image import Image

BLOCK = 16
MB = 1024 * 1024
# Seconds, for what must not wait for ever.
PATIENCE = 60


def image(size: int = 64 * 1024) -> Image:
    half = size // 2
    return Image([Tensor("0.keys", (half,), mx.uint8), Tensor("0.values", (size - half,), mx.uint8)], BLOCK)


def images(size: int = 64 * 1024) -> dict[int, Image]:
    return {0: image(size), STATES: image(size // 4)}


def open_tier(root: Path, limit: int = 100 * MB, staging: int = 8 * MB, **more: object) -> DiskTier:
    settings = {"fingerprint": "model", "name": "a model", "images": images(), **more}
    return DiskTier(root, block_tokens=BLOCK, limit=limit, staging=staging, **settings)  # type: ignore[arg-type]


def address(number: int, tokens: int = BLOCK, parent: bytes = b"p" * 16) -> Address:
    key = hashlib.blake2b(b"%d %d" % (number, tokens), digest_size=16).digest()
    return Address(key, parent, number * BLOCK, b"".join((number + i).to_bytes(4, "little") for i in range(tokens)))


def content(key: bytes, part: int, size: int) -> bytes:
    return hashlib.shake_128(key + bytes([part & 255])).digest(256) * (size // 256 + 1)


def offer(tier: DiskTier, where: Address, part: int = 0, wait: bool = True) -> bool:
    def fill(view: memoryview) -> None:
        view[:] = content(where.key, part, len(view))[: len(view)]

    return tier.offer(where, part, fill, wait)


def store(tier: DiskTier, count: int, first: int = 0) -> list[Address]:
    """Offer that many parts and wait until they are stored."""
    stored = [address(number) for number in range(first, first + count)]
    for where in stored:
        assert offer(tier, where)
    tier.flush()
    return stored


def fetch(tier: DiskTier, *parts: tuple[bytes, int]) -> dict[tuple[bytes, int], bytes | None]:
    """The content of parts."""
    tier.expect(parts)
    buffers = [bytearray(tier._images[part].data_size) for _, part in parts]
    read = tier.read([Target(*part, buffer) for part, buffer in zip(parts, buffers, strict=True)])
    return {part: bytes(b) if ok else None for part, b, ok in zip(parts, buffers, read, strict=True)}


def fetch_one(tier: DiskTier, where: Address, part: int = 0) -> bytes | None:
    return fetch(tier, (where.key, part))[where.key, part]


def is_right(where: Address, part: int, data: bytes | None) -> bool:
    return data is not None and data == content(where.key, part, len(data))[: len(data)]


def files(root: Path) -> list[Path]:
    """All files of parts, whole ones and others."""
    return sorted(path for path in root.glob("*/*/*") if path.is_file())


def file_of(root: Path, where: Address, part: str = "0") -> Path:
    (path,) = root.glob(f"*/*/{where.key.hex()}-{part}.safetensors")
    return path


def in_time(what: Callable[[], object]) -> object:
    """Do it in a thread; a test that waits for ever says so."""
    done: list[object] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            done.append(what())
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it waits for ever"
    if errors:
        raise errors[0]
    return done[0]
