"""Why no more of a prompt was cached, in words: where it diverges from the nearest cached conversation of its key.

`prefix/branch.py` finds the position, in the engine's thread; here it is mapped to text and a message, in another
thread. The same object is the response of /admin/cache/probe and the header `x-onekv-cache`, which is sent if the
request has `x-onekv-explain: 1`. The header reports what the request would find on arrival; requests that run before it
may add to that. A short form is part of the request's log line:
based on what the engine itself found when the request started, and logged after the answer has been sent.

A key's tree contains nothing of other keys, so no word here belongs to another key.
"""

import json
from bisect import bisect_left
from dataclasses import replace
from typing import Any

from ..llm import Probe
from ..prefix.branch import SHOWN, Branch
from ..prefix.figures import NEVER_SEEN, OTHER_SALT
from .backend import Backend
from .call import ChatCall
from .errors import BadRequestError
from .logs import Field
from .prompt import render, written

ASK, ANSWER = "x-onekv-explain", "x-onekv-cache"
# Characters of each side at most, and in the log.
WORDS, SHORT = 60, 32


def explained(backend: Backend, call: ChatCall | None, tokens: list[int], found: Probe) -> dict[str, Any]:
    """What `found` says of `tokens`, which `call` was rendered to, or a plain prompt."""
    # What others asked is not for this key to know.
    reason = NEVER_SEEN if found.reason == OTHER_SALT else found.reason
    leaves = _leaves(backend, call, tokens, found.branch) if found.branch is not None else None
    counts = {"tokens": found.tokens, "cached": found.cached, "cached_in_memory": found.cached_in_memory}
    return {**counts, "reason": reason, "leaves": leaves}


def header(said: dict[str, Any]) -> str:
    """As a header's value: one line of ASCII, at most some 1.5 KB."""
    return json.dumps(said, separators=(",", ":"))


def lost(backend: Backend, call: ChatCall | None, tokens: list[int], branch: Branch) -> list[Field]:
    """The same for the request's line in the log, in short: how many tokens could have been found, if any, and which
    words and in which message the prompt diverges."""
    leaves = _leaves(backend, call, tokens, branch)
    parts = [Field(f"lost={branch.again}", lost=branch.again)] if branch.again else []
    if (message := leaves["message"]) is not None:
        index, role = message["index"], message["role"]
        parts.append(Field(f"message={index}({role})", message_index=index, message_role=role))
    if backend.log_words:
        said = {"before": leaves["before"][-SHORT:], "had": leaves["cached"][:SHORT], "came": leaves["came"][:SHORT]}
        # In quotes, with those inside escaped.
        parts += [Field(f"{name}={json.dumps(said[name], ensure_ascii=False)}", **{name: said[name]}) for name in said]
    return parts


def _leaves(backend: Backend, call: ChatCall | None, tokens: list[int], branch: Branch) -> dict[str, Any]:
    index = _message_at(backend, call, tokens, branch.position) if call is not None else None
    start = max(0, branch.position - SHOWN)
    return {
        "position": branch.position,
        "message": {"index": index, "role": call.messages[index]["role"]} if call and index is not None else None,
        "before": words_of(backend, tokens[start : branch.position])[-WORDS:],
        "cached": words_of(backend, branch.cached)[:WORDS],
        "came": words_of(backend, branch.came)[:WORDS],
        "again": branch.again,
    }


def words_of(backend: Backend, tokens: list[int]) -> str:
    """On one line, with nothing that a terminal or a log would obey."""
    text = " ".join(str(backend.tokenizer.decode(tokens)).split())
    return "".join(character for character in text if character.isprintable())


def _message_at(backend: Backend, call: ChatCall, tokens: list[int], position: int) -> int | None:
    """The message that the token at `position` comes from; None if it comes after all of them.

    The first that makes a prompt long enough to have that token in common with `tokens`. Making tokens takes long, and
    text does not: where the text says that it is, is tried first.
    """
    low, high = 1, len(call.messages) + 1
    shown = str(backend.tokenizer.decode(tokens[: position + 1]))
    likely = bisect_left(range(low, high), True, key=lambda count: _shows(backend, _first(call, count), shown)) + low
    # If the text is right, these two are enough.
    tries = [min(likely, len(call.messages)), likely - 1]
    while low < high:
        count = tries.pop(0) if tries else (low + high) // 2
        if not low <= count < high:
            continue
        if _reaches(backend, _first(call, count), tokens, position):
            high = count
        else:
            low = count + 1
    return low - 1 if low <= len(call.messages) else None


def _first(call: ChatCall, count: int) -> ChatCall:
    return replace(call, messages=call.messages[:count])


def _shows(backend: Backend, beginning: ChatCall, text: str) -> bool:
    """Whether the prompt of the `beginning` starts with `text`."""
    try:
        return written(backend, beginning).startswith(text)
    except BadRequestError:
        return False


def _reaches(backend: Backend, beginning: ChatCall, tokens: list[int], position: int) -> bool:
    """Whether the prompt of the `beginning` has the first `position` of `tokens`, and one more."""
    try:
        made = render(backend, beginning).tokens
    except BadRequestError:
        # Some templates want more messages than these.
        return False
    return made[: position + 1] == tokens[: position + 1]
