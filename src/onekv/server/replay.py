"""A prompt in which turns that were generated here have the token ids they were generated as (`turns`).

Only the template decides how a conversation is rendered. It is rendered twice: as it is, and with a mark in place of
each known turn. The pieces between the marks are the template's own; the text between those pieces in the first
rendering is what the template made of each turn:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n  Hello!  <|im_end|>\\n<|im_start|>user\\n ...
    |__ piece _____________________________________________| |_turn_| |__ piece ______________________

If that text matches the ids (`Said`: apart from surrounding white space and the formatting of a call's JSON), the ids
replace it. If it does not, because the template drops the thinking of earlier turns, or a client has changed a word, it
is tokenized as it is. Thinking that a client left out is passed to the template, which keeps or drops it.

A mark is the content of a message without calls. If the template rejects that, since a result requires a call before
it, the calls stay (`_Form`), and the turn ends where they end. Some templates write an empty thinking block before a
mark; it does not count as part of the piece, as the turn has its own. A turn whose place is not found is tokenized; the
others are still replayed.

Texts before and after a turn are tokenized separately, which is exact if the turn ends with a token that cannot be part
of any text, such as <|im_end|>. With any other template, nothing is replayed.
"""

import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice, pairwise
from typing import Any

from ..ask import TEMPLATE_ERRORS
from .call import ChatMessage
from .segments import Markers
from .turns import Said

Render = Callable[[list[ChatMessage]], str]

# How often another set of marks is tried while the place of a turn is not found.
ATTEMPTS = 6


class _Form(IntEnum):
    """How a turn with calls is marked; each for templates that refuse those before, or write no mark."""

    CONTENT = 0
    WITH_CALLS = 1
    CALLED = 2


@dataclass(frozen=True)
class Turn:
    ids: list[int]
    text: str
    said: Said


@dataclass(frozen=True)
class _Marked:
    """A turn in the text with marks: the piece before it, and what the template writes of it before its mark."""

    index: int
    before: str
    opening: str
    form: _Form


def replay(
    tokenizer: Any, render: Render, markers: Markers, messages: list[ChatMessage], known: dict[int, list[int]]
) -> tuple[str, list[int]]:
    """The text of `messages`, and its tokens; `known` are the ids of some of them."""
    turns: dict[int, Turn] = {}
    for index, ids in known.items():
        text = tokenizer.decode(ids)
        sent, said = Said.of(messages[index]), _read(markers, text)
        if (sent.content, sent.calls) == (said.content, said.calls) and sent.reasoning in ("", said.reasoning):
            turns[index] = Turn(ids, text, said)
    try:
        text = render([_thinking(message, turns.get(index)) for index, message in enumerate(messages)])
    except TEMPLATE_ERRORS:
        # It may be the thinking that it refuses.
        turns, text = {}, render(messages)
    return text, _tokens(tokenizer, text, _places(tokenizer, render, markers, messages, text, turns))


def _read(markers: Markers, text: str) -> Said:
    return Said.of_deltas(markers.split(text))


def _thinking(message: ChatMessage, turn: Turn | None) -> ChatMessage:
    return message | {"reasoning_content": turn.said.reasoning} if turn is not None and turn.said.reasoning else message


# Where the turns are


def _places(
    tokenizer: Any, render: Render, markers: Markers, messages: list[ChatMessage], text: str, turns: dict[int, Turn]
) -> Iterator[tuple[int, int, list[int]]]:
    """From where to where in `text` ids take the place of what the template has written, in order."""
    forms = dict.fromkeys(turns, _Form.CONTENT)
    spans: list[tuple[int, int]] = []
    marked: list[_Marked] = []
    for _ in range(ATTEMPTS):
        marked, rest = _marked(render, markers, messages, turns, forms)
        spans, misplaced = _spans(tokenizer, text, marked, rest)
        if misplaced is None:
            break
        # What is wrong with one turn that calls is wrong with all of them.
        same = [index for index in forms if forms[index] == forms[misplaced] and messages[index].get("tool_calls")]
        _try_next(forms, same if misplaced in same else [misplaced], messages, markers)
    for number, ((start, end), each) in enumerate(zip(spans, marked, strict=False), 1):
        turn, stop = turns[each.index], spans[number][0] if number < len(spans) else len(text)
        if (found := _end(tokenizer, markers, text, start, end, stop, each.form, turn)) is not None:
            yield start, found, turn.ids


def _try_next(forms: dict[int, _Form], failed: list[int], messages: list[ChatMessage], markers: Markers) -> None:
    """Give those that `failed` their next form; those that have none are left out."""
    last = _Form.CALLED if markers.call_start else _Form.WITH_CALLS
    for index in failed:
        if messages[index].get("tool_calls") and forms[index] < last:
            forms[index] = _Form(forms[index] + 1)
        else:
            del forms[index]


def _marked(
    render: Render, markers: Markers, messages: list[ChatMessage], turns: dict[int, Turn], forms: dict[int, _Form]
) -> tuple[list[_Marked], str]:
    """What the template writes before each turn in `forms`, and after the last. Turns that it does not write once get
    their next form."""
    marks = {index: f"turn{secrets.token_hex(8)}" for index in forms}
    text = ""
    while forms:
        talk = [
            _mark(message, marks[index], forms[index]) if index in forms else message
            for index, message in enumerate(messages)
        ]
        try:
            text = render(talk)
            failed = [index for index in forms if text.count(marks[index]) != 1]
        except TEMPLATE_ERRORS:
            failed = [index for index in forms if messages[index].get("tool_calls")] or list(forms)
        if not failed:
            break
        _try_next(forms, failed, messages, markers)
    found = []
    for index, form in forms.items():
        piece, _, text = text.partition(marks[index])
        cut = piece.rfind(markers.call_start or "") if form == _Form.CALLED else -1
        cut = len(piece) if cut < 0 else cut
        found.append(_Marked(index, _before(piece[:cut], markers, turns[index]), piece[cut:], form))
    return found, text


def _mark(message: ChatMessage, mark: str, form: _Form) -> ChatMessage:
    if form == _Form.CONTENT:
        return {"role": "assistant", "content": mark}
    if form == _Form.WITH_CALLS:
        return {"role": "assistant", "content": mark, "tool_calls": message["tool_calls"]}
    first, *others = message["tool_calls"]
    first = first | {"function": first["function"] | {"name": mark}}
    return {"role": "assistant", "content": message.get("content"), "tool_calls": [first, *others]}


def _before(piece: str, markers: Markers, turn: Turn) -> str:
    """`piece` without what the turn has itself: an empty thinking block, and the space before it."""
    begun = turn.text.lstrip()
    if not (markers.think_start and markers.think_end and begun.startswith(markers.think_start)):
        return piece
    empty = rf"{re.escape(markers.think_start)}\s*{re.escape(markers.think_end)}\s*\Z"
    # The last one there is: a search from the start would look at all of the conversation.
    at = piece.rfind(markers.think_start)
    if at < 0 or re.compile(empty).match(piece, at) is None:
        return piece
    return piece[:at].removesuffix(turn.text[: len(turn.text) - len(begun)])


def _spans(tokenizer: Any, text: str, marked: list[_Marked], rest: str) -> tuple[list[tuple[int, int]], int | None]:
    """From where to where in `text` each turn is, up to the first that does not have around it what the text with
    marks has, and the index of that one."""
    spans: list[tuple[int, int]] = []
    if not marked:
        return spans, None
    if not text.startswith(marked[0].before + marked[0].opening):
        return spans, marked[0].index
    start = len(marked[0].before)
    for each, following in pairwise(marked):
        at, piece = start + len(each.opening), following.before + following.opening
        # The same piece may come again; a turn has but one end.
        end = text.find(_token_at(tokenizer, piece) or piece, at)
        if end < 0 or not text.startswith(piece, end):
            # It differs at its start, which is the end of one turn, or later, at the beginning of the next.
            later = end >= 0 and text.startswith(piece[: len(piece) // 2], end)
            return spans, following.index if later else each.index
        spans.append((start, end))
        start = end + len(following.before)
    end = len(text) - len(rest)
    if end < start + len(marked[-1].opening) or not text.endswith(rest):
        return spans, marked[-1].index
    return [*spans, (start, end)], None


def _end(
    tokenizer: Any, markers: Markers, text: str, start: int, end: int, stop: int, form: _Form, turn: Turn
) -> int | None:
    """Where the turn that begins at `start` ends, at `end` or with the calls that follow there, but before `stop`;
    None if it does not say there what was generated, or if what comes next is not a token of its own."""
    ends = iter([end]) if form == _Form.CONTENT else _ends_of_calls(tokenizer, markers, text, end, stop)
    for at in islice(ends, max(1, len(turn.said.calls))):
        if _read(markers, text[start:at]) == turn.said and _token_at(tokenizer, text, at):
            return at
    return None


def _ends_of_calls(tokenizer: Any, markers: Markers, text: str, at: int, stop: int) -> Iterator[int]:
    # A call without an end marker ends with the turn.
    marker = markers.call_end or str(tokenizer.eos_token)
    while (at := text.find(marker, at, stop)) >= 0:
        yield at + len(markers.call_end or "")
        at += len(marker)


def _token_at(tokenizer: Any, text: str, at: int = 0) -> str | None:
    """The token of its own that begins there, whatever text comes before it, if one does."""
    return next(
        (str(token) for token in tokenizer.added_tokens_decoder.values() if text.startswith(str(token), at)), None
    )


# Tokens


def _tokens(tokenizer: Any, text: str, places: Iterator[tuple[int, int, list[int]]]) -> list[int]:
    tokens: list[int] = []
    done = 0
    for start, end, ids in places:
        tokens += [*_encode(tokenizer, text[done:start]), *ids]
        done = end
    return tokens + _encode(tokenizer, text[done:])


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
