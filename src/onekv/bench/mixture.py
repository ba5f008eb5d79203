"""The requests of the soak test: a seeded mixture, each with its expected outcome."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .clients import KEYS, words

LONGEST_PROMPT, MOST_TOKENS = 600, 24
CANCELLED, MALFORMED = 0.10, 0.05
# Bodies are at most this long, in bytes.
MAX_BODY = 65536
SCHEMA = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}},
    "required": ["good"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Call:
    """A request and what must come of it. `check` says what is wrong with an answer of status 200, if anything is."""

    kind: str
    path: str
    body: bytes
    status: int = 200
    key: str = KEYS[0]
    # Seconds after which the client closes the connection.
    patience: float | None = None
    check: Callable[["Reply"], str | None] = lambda reply: None


@dataclass
class Reply:
    """Of an answer in either API's format: texts by index, how each ended, and the tokens that were counted."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: int = 0
    generated: int = 0
    error: Any = None

    def add(self, part: dict[str, Any]) -> None:
        """A whole answer, or one event of it."""
        self.error = part.get("error") or self.error
        usage = part.get("usage") or {}
        self.generated = usage.get("completion_tokens") or usage.get("output_tokens") or self.generated
        for choice in part.get("choices", []):
            said = choice.get("message") or choice.get("delta") or choice
            self._add(choice["index"], said.get("content") or said.get("text"), choice["finish_reason"])
            self.logprobs += bool(choice.get("logprobs"))
        # Anthropic's: the message, or the part of it that changes.
        change = part if part.get("type") == "message" else part.get("delta", {})
        blocks = change.get("content", []) if isinstance(change.get("content"), list) else [change]
        for block in blocks:
            self._add(0, block.get("text"), None)
        self._add(0, None, change.get("stop_reason"))

    def _add(self, index: int, text: str | None, reason: str | None) -> None:
        if text:
            self.texts[index] = self.texts.get(index, "") + text
        if reason:
            self.reasons[index] = reason


class Mixture:
    """An endless, seeded sequence of calls."""

    def __init__(self, seed: int, model: str) -> None:
        self._random, self._model = random.Random(seed), model
        self._systems = [words(random.Random(f"system {n}"), length) for n, length in enumerate((40, 120, 200, 320))]

    def next(self) -> Call:
        if self._random.random() < MALFORMED:
            return self._malformed()
        patience = self._random.uniform(0, 3) if self._random.random() < CANCELLED else None
        make = self._random.choice((self._chat, self._chat, self._completion, self._message))
        return make(patience, self._random.choice(KEYS))

    def _length(self) -> int:
        """Of a prompt: short ones are more frequent, as in life."""
        return round(math.exp(self._random.uniform(0, math.log(LONGEST_PROMPT))))

    def _texts(self) -> tuple[str | None, str]:
        """Perhaps a system prompt that others have too, and a question; together no longer than the longest."""
        length = self._length()
        system = self._random.choice(self._systems)
        room = length - len(system.split())
        if room < 1:
            return None, words(self._random, length)
        return system, words(self._random, room)

    def _chat(self, patience: float | None, key: str) -> Call:
        system, question = self._texts()
        messages = [{"role": "user", "content": question}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        body = self._common(messages=messages)
        kind = self._random.choice(("plain", "plain", "logprobs", "stop", "two", "schema"))
        if kind == "logprobs":
            body |= {"logprobs": True, "top_logprobs": 2}
        elif kind == "stop":
            body["stop"] = ["e", "\n"]
        elif kind == "two":
            body["n"] = 2
        elif kind == "schema":
            schema = {"name": "verdict", "schema": SCHEMA}
            body |= {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": MOST_TOKENS}
        return _call(f"chat {kind}", "/v1/chat/completions", body, patience, key)

    def _completion(self, patience: float | None, key: str) -> Call:
        body = self._common(prompt="".join(text or "" for text in self._texts()))
        if self._random.random() < 0.3:
            body["logprobs"] = 2
        return _call("completion", "/v1/completions", body, patience, key)

    def _message(self, patience: float | None, key: str) -> Call:
        system, question = self._texts()
        body = self._common(messages=[{"role": "user", "content": question}])
        body.pop("stream_options", None)
        if system is not None:
            body["system"] = system
        return _call("message", "/v1/messages", body, patience, key)

    def _common(self, **rest: Any) -> dict[str, Any]:
        body = {"model": self._model, "max_tokens": self._random.randint(1, MOST_TOKENS), **rest}
        body["temperature"] = self._random.choice((0, 0, 0.7, 1))
        if self._random.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def _malformed(self) -> Call:
        good = self._common(messages=[{"role": "user", "content": "Hello."}])
        text = json.dumps(good).encode()
        deep = b'{"model": ' + b"[" * 100 + b"]" * 100 + b"}"
        long = good | {"messages": [{"role": "user", "content": words(self._random, 5000)}]}
        calls = [
            ("no JSON", text[: self._random.randrange(len(text))], 400),
            ("wrong type", json.dumps(good | {"messages": "Hello."}).encode(), 400),
            ("no messages", json.dumps(good | {"messages": []}).encode(), 400),
            ("huge number", json.dumps(good | {"temperature": 10**30}).encode(), 400),
            ("no number", json.dumps(good | {"temperature": float("nan")}).encode(), 400),
            ("deep nesting", deep, 400),
            ("unknown model", json.dumps(good | {"model": "no-such-model"}).encode(), 404),
            ("prompt too long", json.dumps(long).encode(), 400),
            ("body too large", b" " * (MAX_BODY + 1), 413),
            ("wrong key", text, 401),
        ]
        kind, body, status = self._random.choice(calls)
        path = self._random.choice(("/v1/chat/completions", "/v1/messages"))
        return Call(kind, path, body, status, "no-such-key" if kind == "wrong key" else KEYS[0])


def _call(kind: str, path: str, body: dict[str, Any], patience: float | None, key: str) -> Call:
    """A call that must be answered, and how to tell whether it was."""

    def check(reply: Reply) -> str | None:
        answers = body.get("n", 1)
        if reply.error is not None:
            return f"it failed in the middle of the answer: {reply.error}"
        if set(reply.reasons) != set(range(answers)):
            return f"{answers} answers were requested, but {len(reply.reasons)} ended"
        if not reply.reasons.keys() >= reply.texts.keys():
            return "there is text of an answer that was not requested"
        if not 1 <= reply.generated <= answers * body["max_tokens"]:
            return f"{reply.generated} tokens for {answers} answers of {body['max_tokens']} tokens at most"
        if body.get("logprobs") and reply.logprobs == 0 and any(reply.texts.values()):
            return "there are no log probabilities"
        stops = body.get("stop", [])
        if any(stop in text for stop in stops for text in reply.texts.values()):
            return "a stop string is in the text"
        if "response_format" in body and reply.reasons[0] == "stop":
            try:
                json.loads(reply.texts.get(0, ""))
            except ValueError:
                return f"the answer is not JSON: {reply.texts}"
        return None

    return Call(kind, path, json.dumps(body).encode(), key=key, patience=patience, check=check)
