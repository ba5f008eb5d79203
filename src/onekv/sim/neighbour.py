"""Another model of the same process, with its blocks in the same folder: a tier that is opened, used and closed while
the engine's is open. What it reads must be what it stored, whatever the other one writes, evicts or leaves behind.
"""

import hashlib
from collections import Counter
from pathlib import Path
from random import Random

import mlx.core as mx

from ..errors import SettingError
from ..memory.pool.blocks import Tensor
from ..tiers.base import Address, Target
from ..tiers.disk import DiskTier
from ..tiers.files import Clock, Files
from ..tiers.image import Image
from .model import Violation

BLOCK, NODES, SIZE = 4, 24, 3000


class Neighbour:
    """Its tier is open, or there is none."""

    def __init__(self, folder: Path, files: Files, clock: Clock, counts: Counter[str]) -> None:
        self._folder, self._files, self._clock, self._counts = folder, files, clock, counts
        self.tier: DiskTier | None = None

    def act(self, limit: int, a: int, b: int) -> None:
        """Something that a tier can be asked for, chosen by the numbers."""
        random = Random(a)
        if self.tier is None:
            self._open(limit)
        elif b % 9 == 0:
            self.close()
        elif b % 9 == 1:
            self.tier.clear()
        elif b % 9 < 5:
            for _ in range(1 + random.randrange(6)):
                self._offer(self.tier, random.randrange(NODES))
            self.tier.work(random.randrange(4))
        elif b % 9 < 8:
            self._read(self.tier, random.sample(range(NODES), 3))
        else:
            self.tier.work(8)

    def _open(self, limit: int) -> None:
        image = Image([Tensor("keys", (SIZE,), mx.uint8)], BLOCK)
        try:
            self.tier = DiskTier(
                self._folder,
                "neighbour",
                "neighbour",
                {0: image},
                BLOCK,
                limit,
                8 * image.size,
                files=self._files,
                clock=self._clock,
                threads=False,
            )
            self._counts["neighbour opened"] += 1
        except SettingError:
            # The disk refuses; it goes without.
            self._counts["neighbour could not be opened"] += 1

    def _offer(self, tier: DiskTier, number: int) -> None:
        where = _address(number)

        def fill(view: memoryview) -> None:
            view[:] = _content(where.key)

        self._counts["neighbour: taken"] += tier.offer(where, 0, fill)

    def _read(self, tier: DiskTier, numbers: list[int]) -> None:
        parts = [(key, 0) for key in tier.find([_address(number).key for number in numbers])]
        buffers = [bytearray(SIZE) for _ in parts]
        tier.expect(parts)
        answers = tier.read([Target(key, part, into) for (key, part), into in zip(parts, buffers, strict=True)])
        for (key, _), into, there in zip(parts, buffers, answers, strict=True):
            self._counts["neighbour: read"] += bool(there)
            if there and bytes(into) != _content(key):
                raise Violation("the neighbour has read what it did not store")

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
            self.tier = None

    def kill(self) -> None:
        if self.tier is not None:
            self.tier.kill()
            self.tier = None


def _address(number: int) -> Address:
    tokens = b"".join(value.to_bytes(4, "little") for value in range(number, number + BLOCK))
    return Address(hashlib.blake2b(tokens, digest_size=16).digest(), b"neighbour", number * BLOCK, tokens)


def _content(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(SIZE)
