"""Streaming text for byte-level tokens, equal to decoding all of them at once."""

import codecs
from typing import Any

from tokenizers import pre_tokenizers

from .limits import import_mlx_lm

import_mlx_lm()

from mlx_lm.tokenizer_utils import StreamingDetokenizer  # noqa: E402


def _byte_of_char() -> dict[str, int]:
    """The byte each character of a byte-level token stands for.

    Printable bytes stand for themselves, in order; the others take the characters from U+0100 on,
    in order.
    """
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    own = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    others = (byte for byte in range(256) if chr(byte) not in own)
    return own | {chr(256 + index): byte for index, byte in enumerate(others)}


class ByteLevelDetokenizer(StreamingDetokenizer):  # type: ignore[misc]
    """Text grows with each token; an unfinished character is held back until it is whole.

    mlx-lm's own drops a leading space and garbles the byte 0, so its text is not what `decode`
    gives.
    """

    def __init__(self, tokenizer: Any):
        byte_of = _byte_of_char()
        self._pieces = [
            bytes(byte_of[char] for char in token)
            if all(char in byte_of for char in token)
            else token.encode()
            for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        ]
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
        self.text += self._decoder.decode(piece)

    def finalize(self) -> None:
        self.text += self._decoder.decode(b"", final=True)
