"""A prompt in which turns that were generated here have the token ids they were generated as (`turns`).

The template alone decides how a conversation is written. It is rendered twice: as it is, and with a mark in the place
of each known turn. What lies between the marks is the template's own; what the first text has between those pieces is
what the template made of each turn:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n  Hello!  <|im_end|>\\n<|im_start|>user\\n ...
    |__ piece _____________________________________________| |_turn_| |__ piece ______________________

If that says what the ids say (`Said`: white space around it and the spelling of a call's JSON aside), the ids take its
place. If it does not, as where the template drops the thinking of earlier turns, or a client has changed a word, it is
tokenized as it stands. Thinking that a client left out is given to the template, which keeps it where it wants it.

Texts before and after a turn are tokenized apart, which is exact where a token that no text can become part of ends the
turn, such as <|im_end|>. With any other template nothing is replayed.
"""

import secrets
from collections.abc import Callable
from typing import Any

from .call import ChatMessage
from .turns import Said

Turn = tuple[list[int], Said]


def replay(
    tokenizer: Any,
    render: Callable[[list[ChatMessage]], str],
    read: Callable[[str], Said],
    messages: list[ChatMessage],
    known: dict[int, list[int]],
) -> tuple[str, list[int]]:
    """The text of `messages`, and its tokens; `known` are the ids of some of them. `read` tells what a text says."""
    turns: dict[int, Turn] = {}
    for index, ids in known.items():
        sent, said = Said.of(messages[index]), read(tokenizer.decode(ids))
        if (sent.content, sent.calls) == (said.content, said.calls) and sent.reasoning in ("", said.reasoning):
            turns[index] = ids, said
    text = render([_thinking(message, turns.get(index)) for index, message in enumerate(messages)])
    pieces = _pieces(render, messages, list(turns)) if turns else None
    return text, _tokens(tokenizer, text, pieces or [text], list(turns.values()) if pieces else [], read)


def _thinking(message: ChatMessage, turn: Turn | None) -> ChatMessage:
    return message | {"reasoning_content": turn[1].reasoning} if turn is not None and turn[1].reasoning else message


def _pieces(
    render: Callable[[list[ChatMessage]], str], messages: list[ChatMessage], turns: list[int]
) -> list[str] | None:
    """What the template writes around `turns`; None if it does not write each of them once, in order."""
    marks = {index: f"turn{secrets.token_hex(8)}" for index in turns}
    rest = render(
        [
            {"role": "assistant", "content": marks[index]} if index in marks else message
            for index, message in enumerate(messages)
        ]
    )
    pieces = []
    for mark in marks.values():
        if rest.count(mark) != 1:
            return None
        piece, rest = rest.split(mark)
        pieces.append(piece)
    return [*pieces, rest]


def _tokens(tokenizer: Any, text: str, pieces: list[str], turns: list[Turn], read: Callable[[str], Said]) -> list[int]:
    """Tokens of `text`, which has the `turns` between the `pieces`."""
    first, *others = pieces
    if not text.startswith(first):
        return _encode(tokenizer, text)
    tokens: list[int] = []
    # What is to be tokenized next, and how far the text is done.
    pending, at = first, len(first)
    for number, ((ids, said), piece) in enumerate(zip(turns, others, strict=True), 1):
        end = text.find(piece, at) if number < len(others) else len(text) - len(piece)
        if end < at or not text.startswith(piece, end):
            return _encode(tokenizer, text)
        written, at = text[at:end], end + len(piece)
        if read(written) == said and _ends_turn(tokenizer, piece):
            tokens += [*_encode(tokenizer, pending), *ids]
            pending = piece
        else:
            pending += written + piece
    return tokens + _encode(tokenizer, pending)


def _ends_turn(tokenizer: Any, piece: str) -> bool:
    """Whether `piece` begins with a token of its own, whatever text comes before it."""
    return any(piece.startswith(str(token)) for token in tokenizer.added_tokens_decoder.values())


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
