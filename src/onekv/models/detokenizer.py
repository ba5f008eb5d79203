"""Streaming text, token by token, equal to decoding all tokens at once."""

import codecs
import re
from typing import Any

from mlx_lm.tokenizer_utils import StreamingDetokenizer
from tokenizers import pre_tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    """The byte each character of a byte-level token stands for.

    Printable bytes stand for themselves, in order; the others take the characters from U+0100 on,
    in order.
    """
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    own = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    others = (byte for byte in range(256) if chr(byte) not in own)
    return own | {chr(256 + index): byte for index, byte in enumerate(others)}


class _BytesDetokenizer(StreamingDetokenizer):  # type: ignore[misc]
    """Text grows with each token; an unfinished character is held back until it is whole.

    mlx-lm's own drop leading spaces and garble the byte 0, so their text is not what `decode` gives.
    """

    def __init__(self, pieces: list[bytes], strip_space: bool):
        self._pieces = pieces
        self._strip_space = strip_space
        self.reset()

    def reset(self) -> None:
        self.offset = 0
        self.text = ""
        self.tokens: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        # Ids past the vocabulary exist where the embedding is padded; they stand for no text.
        piece = self._pieces[token] if token < len(self._pieces) else b""
        if self._strip_space and len(self.tokens) == 1:
            piece = piece.removeprefix(b" ")
        self.text += self._decoder.decode(piece)

    def finalize(self) -> None:
        self.text += self._decoder.decode(b"", final=True)


class ByteLevelDetokenizer(_BytesDetokenizer):
    """For GPT-2's kind of tokens, whose characters stand for bytes."""

    def __init__(self, tokenizer: Any):
        byte_of = _byte_of_char()
        pieces = [
            bytes(byte_of[char] for char in token) if all(char in byte_of for char in token) else token.encode()
            for token in _tokens(tokenizer)
        ]
        super().__init__(pieces, strip_space=False)


class SentencePieceDetokenizer(_BytesDetokenizer):
    """For tokens with U+2581 for a space and <0xNN> for a byte. `strip_space` drops the one that
    encoding put before the text. Bytes that are no UTF-8 may give fewer U+FFFD than `decode` does.
    """

    def __init__(self, tokenizer: Any, strip_space: bool):
        pieces = [
            bytes([int(match[1], 16)]) if (match := _BYTE.fullmatch(token)) else token.replace("\u2581", " ").encode()
            for token in _tokens(tokenizer)
        ]
        super().__init__(pieces, strip_space)


def token_bytes(tokenizer: Any, tokens: list[int]) -> list[bytes]:
    """The bytes that each token stands for, whichever of the two kinds its tokenizer is; part of a character, too."""
    added = tokenizer.get_added_vocab()
    # Where characters stand for bytes, no token can have U+2581 in it; elsewhere it is one.
    byte_level = _knows(tokenizer, "\u0120") and not _knows(tokenizer, "\u2581")
    byte_of = _byte_of_char()
    found = []
    for token in tokenizer.convert_ids_to_tokens(tokens):
        if token is None or token in added:
            found.append((token or "").encode())
        elif byte_level and all(char in byte_of for char in token):
            found.append(bytes(byte_of[char] for char in token))
        elif match := _BYTE.fullmatch(token):
            found.append(bytes([int(match[1], 16)]))
        else:
            found.append(token.replace("\u2581", " ").encode())
    return found


def _knows(tokenizer: Any, token: str) -> bool:
    return tokenizer.convert_tokens_to_ids(token) not in (None, tokenizer.unk_token_id)


def _tokens(tokenizer: Any) -> list[str]:
    tokens: list[str] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return tokens
