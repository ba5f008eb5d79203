"""A part in a store: its file as on disk (`image.py`), followed by a 64-byte seal.

    | header | data | b"onekv-1\\0" | xxh3, 128 bits, of header and data | MAC, 256 bits | 8 zeros |

The MAC is blake2b, keyed with the secret, over the part's name and its file. The name includes the model's fingerprint,
the node's key and the part, so content in the wrong place is not accepted either. Without a secret it is a plain hash:
it detects damage, not forgery.

Names are those of the disk tier's files, prefixed with a space derived from the secret and the kind of seal: servers
with different ones do not see each other's parts, and so do not remove them as forged.
"""

import hashlib
import hmac
import json

import xxhash

from ..base import STATES, Address
from ..image import KEY_BYTES, TOKEN_BYTES, Image

MAGIC = b"onekv-1\0"
CHECKSUM, MAC = 16, 32
SEAL = 64

_METADATA = b'{"__metadata__":'

# What is wrong with a value.
DAMAGED, FORGED = "it does not match its checksum", "its MAC is wrong"


class Sealer:
    def __init__(self, model: str, secret: str | None, block_tokens: int) -> None:
        """`model` is the hash that names the model's folder on disk."""
        self.model, self._tokens = model, block_tokens
        key = hashlib.blake2b(secret.encode(), person=b"onekv tier key").digest() if secret is not None else b""
        self._key = key
        self._space = hashlib.blake2b(MAGIC, key=key, person=b"onekv tier name", digest_size=8).hexdigest()

    def name(self, key: bytes, part: int) -> str:
        text = key.hex()
        return f"onekv/{self._space}/{self.model}/{text[:2]}/{text}-{_part(part)}.safetensors"

    @property
    def probe(self) -> str:
        """The name of the value that is used for measurements."""
        return f"onekv/{self._space}/probe"

    def head_size(self, image: Image) -> int:
        """How many first bytes of a value name all of its address."""
        longest = Address(bytes(KEY_BYTES), bytes(KEY_BYTES), 2**63 - 1, bytes(self._tokens * TOKEN_BYTES))
        return image.header(self.model, longest).index(b"}") + 1

    def address(self, head: bytes, image: Image) -> Address | None:
        """The address in the first bytes of a value; None if no part of this kind begins like that."""
        try:
            end = head.index(b"}") + 1
            said = json.loads(head[8 + len(_METADATA) : end])
            address = Address(
                bytes.fromhex(said["key"]),
                bytes.fromhex(said["parent"]),
                int(said["start"]),
                bytes.fromhex(said["tokens"]),
            )
            whole = len(address.key) <= KEY_BYTES and len(address.tokens) == self._tokens * TOKEN_BYTES
            right = whole and image.header(self.model, address)[:end] == head[:end]
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return None
        return address if right else None

    def seal(self, name: str, value: memoryview) -> None:
        """Fill in the last `SEAL` bytes."""
        content = value[:-SEAL]
        parts = (MAGIC, xxhash.xxh3_128_digest(content), self._mac(name, content))
        value[-SEAL:] = b"".join(parts).ljust(SEAL, b"\0")

    def problem(self, name: str, value: memoryview, image: Image, address: Address) -> str | None:
        """What is wrong with a value that should be this part; None if it is right."""
        if len(value) != image.size + SEAL:
            return f"its size is not {image.size + SEAL} bytes"
        content, seal = value[:-SEAL], bytes(value[-SEAL:])
        checksum, mac = seal[8 : 8 + CHECKSUM], seal[8 + CHECKSUM : 8 + CHECKSUM + MAC]
        if seal[:8] != MAGIC or xxhash.xxh3_128_digest(content) != checksum:
            return DAMAGED
        if not hmac.compare_digest(self._mac(name, content), mac):
            return FORGED
        if bytes(content[: image.header_size]) != image.header(self.model, address):
            return "it is a different block"
        return None

    def _mac(self, name: str, content: memoryview) -> bytes:
        mac = hashlib.blake2b(key=self._key, person=b"onekv tier mac", digest_size=MAC)
        mac.update(len(name).to_bytes(8, "little") + name.encode())
        mac.update(content)
        return mac.digest()


def _part(part: int) -> str:
    return "states" if part == STATES else str(part)
