"""Authenticated messages between rank 0 and another rank, over TCP.

    handshake   each side sends 16 random bytes; both derive the connection's key from these and the launch's secret
    frame       length (4 bytes, big-endian) | JSON object | MAC (16 bytes: keyed blake2b of direction, counter, JSON)

Rank 0 generates the secret for each launch and broadcasts it within the group (group.py). A wrong MAC ends the
connection, so someone who can reach the port can neither inject messages nor replay, reorder or drop them. Messages are
not encrypted: they contain token ids, on the network that also carries the activations.
"""

import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any

from ..errors import ParallelError

Message = dict[str, Any]

NONCE, MAC = 16, 16
# Upper bound for a frame; the largest are prompt chunks.
MOST = 64 << 20
# Timeout for the handshake.
GREET_SECONDS = 10.0

_LENGTH, _NUMBER = struct.Struct(">I"), struct.Struct(">Q")


class Gone(Exception):
    """The connection is closed or broken."""


class Wire:
    """One connection. Any thread may send; one thread receives."""

    def __init__(self, opened: socket.socket, secret: bytes, leads: bool) -> None:
        """`leads`: whether this side is rank 0. The peer has proven itself once its first message arrives.

        Raises Gone.
        """
        self._socket, self._lock = opened, threading.Lock()
        self._ours, self._theirs = (b"leader", b"follower") if leads else (b"follower", b"leader")
        self._sent = self._received = 0
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.settimeout(GREET_SECONDS)
        nonce = os.urandom(NONCE)
        self._write(nonce)
        other = self._read(NONCE)
        nonces = nonce + other if leads else other + nonce
        self._key = hashlib.blake2b(nonces, key=secret, digest_size=32).digest()
        # When the last message arrived (`time.monotonic`).
        self.heard = time.monotonic()

    def greeted(self) -> None:
        """The handshake is over: no more timeouts."""
        self._socket.settimeout(None)

    def send(self, message: Message | bytes) -> None:
        """Send a message, or an encoded one. Raises Gone."""
        data = message if isinstance(message, bytes) else encode(message)
        with self._lock:
            mac = self._mac(self._ours, self._sent, data)
            self._sent += 1
            self._write(_LENGTH.pack(len(data)) + data + mac)

    def receive(self) -> Message:
        """The next message. Raises Gone, or ParallelError if it is not authentic."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MOST:
            raise ParallelError(f"received a message of {length} bytes, more than {MOST}, from another rank")
        data, mac = self._read(length), self._read(MAC)
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, data)):
            raise ParallelError("received a message with a wrong MAC")
        self._received += 1
        self.heard = time.monotonic()
        message: Message = json.loads(data)
        return message

    def _mac(self, direction: bytes, number: int, data: bytes) -> bytes:
        return hashlib.blake2b(_NUMBER.pack(number) + data, key=self._key, person=direction, digest_size=MAC).digest()

    def _write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise Gone(str(error)) from error

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(min(size - len(parts), 1 << 20))
            except OSError as error:
                raise Gone(str(error)) from error
            if not part:
                raise Gone("the connection was closed")
            parts += part
        return bytes(parts)

    def close(self) -> None:
        # `close` alone does not wake a thread that is blocked in recv.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()
