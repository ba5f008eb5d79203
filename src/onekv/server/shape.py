"""The shape of a JSON text, looked at before it is parsed: how deep it is nested, how many values it has.

Parsing holds the interpreter's lock from the first byte to the last, in any thread, and takes longer the more arrays
and objects there are: several seconds for 30 MB of `[],`. So texts that no request needs are rejected unparsed. The
check takes a few milliseconds per megabyte, and the event loop runs between two slices.
"""

import asyncio
from collections.abc import Iterator

import numpy as np

from .errors import BadRequestError

MAX_NESTING = 64
# An agent's long conversation has some ten thousand; a prompt of token ids has many values.
MAX_CONTAINERS = 32_768
MAX_VALUES = 1_000_000
SLICE = 2**20

_CHANGE = np.zeros(256, np.int8)
_CHANGE[list(b"[{")], _CHANGE[list(b"]}")] = 1, -1
_OTHER = bytes(set(range(256)) - set(b'[]{},"'))


async def check_shape(body: bytes) -> None:
    """Raises BadRequestError for a body that is nested too deep or has too many values; at the first slice that has."""
    if b"\0" in body:
        # UTF-16 and UTF-32, which Python's parser would take and which cannot be looked at byte by byte.
        raise BadRequestError("the body is not valid JSON in UTF-8")
    containers = values = 0
    for deepest, opened, separated in _slices(body):
        containers, values = containers + opened, values + separated
        if deepest > MAX_NESTING:
            raise BadRequestError(f"the body is nested deeper than {MAX_NESTING} levels")
        if containers > MAX_CONTAINERS:
            raise BadRequestError(f"the body has more than {MAX_CONTAINERS} arrays and objects")
        if values > MAX_VALUES:
            raise BadRequestError(f"the body has more than {MAX_VALUES} values")
        if len(body) > SLICE:
            await asyncio.sleep(0)


def nesting(body: bytes) -> int:
    """How deep the arrays and objects of a JSON text are nested."""
    return max((deepest for deepest, _, _ in _slices(body)), default=0)


def _slices(body: bytes) -> Iterator[tuple[int, int, int]]:
    """For each slice of `body`: the deepest level in it, how many arrays and objects begin, how many commas it has."""
    # Without what is escaped, every quotation mark begins or ends a string.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHER)
    inside, depth = False, 0
    for start in range(0, len(plain), SLICE):
        each = np.frombuffer(plain, np.uint8, min(SLICE, len(plain) - start), start)
        quoted = np.logical_xor.accumulate(each == ord('"')) ^ inside
        change = _CHANGE[each] * ~quoted
        levels = np.cumsum(change, dtype=np.int32) + depth
        yield max(depth, int(levels.max())), int((change > 0).sum()), int(((each == ord(",")) & ~quoted).sum())
        inside, depth = bool(quoted[-1]), int(levels[-1])
