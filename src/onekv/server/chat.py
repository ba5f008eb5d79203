"""What both chat APIs become: a `ChatCall` in, a stream of parts out.

A call is rendered with the model's own chat template to tokens; a choice's text is split into reasoning, content and
tool calls as it comes. Tools: where the template knows tools, it renders them and mlx-lm's parser for that template
reads the calls; else they are described in the system message and called as <tool_call>{json}</tool_call>. A call that
must be made (`tool_choice` "required" or a name) and JSON that must fit a schema are enforced token by token.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Literal

from ..engine import Constraint, End, Logprob, Piece
from .backend import Backend, Generation, Prompt
from .call import ChatCall
from .constrain import constraint_for
from .prompt import Rendered, render, text_format
from .segments import Call, Span, Splitter


@dataclass(frozen=True)
class Text:
    """Content or reasoning; the first may carry log probabilities, one for each token."""

    kind: Literal["content", "reasoning"]
    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)


@dataclass(frozen=True)
class ToolCall:
    """A whole call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


Part = Text | ToolCall


class Choice(AsyncIterator[Part]):
    """One answer as it comes. After the last part, `end` and `finish_reason` say how it ended."""

    end: End
    finish_reason: Literal["stop", "length", "tool_calls"]

    def __init__(self, generation: Generation, splitter: Splitter, stop_tokens: set[int], prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self._generation, self._splitter, self._stop_tokens = generation, splitter, stop_tokens
        self._parts: deque[Part] = deque()
        # Tokens whose text has not come yet, with their log probabilities if those were asked for.
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []
        self._ended = self._called = False
        self.reasoning_tokens = 0

    async def __anext__(self) -> Part:
        while not self._parts:
            if self._ended:
                raise StopAsyncIteration
            try:
                self._take(await anext(self._generation))
            except StopAsyncIteration:
                self._finish()
        return self._parts.popleft()

    def _take(self, piece: Piece) -> None:
        # The token that ends an answer is no part of it.
        shown = [index for index, token in enumerate(piece.tokens) if token not in self._stop_tokens]
        self._tokens += [piece.tokens[index] for index in shown]
        self._logprobs += [piece.logprobs[index] for index in shown if piece.logprobs]
        self._add(self._splitter.feed(piece.text))

    def _add(self, found: list[Span | Call]) -> None:
        for each in found:
            if isinstance(each, Call):
                self._called = True
                self._parts.append(ToolCall(f"call_{secrets.token_hex(12)}", each.name, each.arguments))
            else:
                self._parts.append(Text(each.kind, each.text, self._tokens, self._logprobs))
                if each.kind == "reasoning":
                    self.reasoning_tokens += len(self._tokens)
            self._tokens, self._logprobs = [], []

    def _finish(self) -> None:
        self._ended = True
        self._add(self._splitter.finish())
        if self._logprobs:
            self._parts.append(Text("content", "", self._tokens, self._logprobs))
        assert self._generation.end is not None
        self.end = self._generation.end
        if self.end.finish_reason == "length":
            self.finish_reason = "length"
        else:
            self.finish_reason = "tool_calls" if self._called else "stop"


async def open_chat(backend: Backend, call: ChatCall, stack: AsyncExitStack) -> list[Choice]:
    """Start the `call.n` answers; they end with `stack`. Raises what a client may be told before the answer begins."""
    rendered, constraints = await asyncio.to_thread(_prepare, backend, call)
    prompts = [
        Prompt(
            rendered.tokens,
            call.max_tokens,
            call.sampling.of_answer(index),
            call.stops,
            call.top_logprobs,
            constraint,
            call.salt,
            call.clamp,
        )
        for index, constraint in enumerate(constraints)
    ]
    generations = await stack.enter_async_context(backend.generate(prompts))
    form = text_format(backend.tokenizer, call)
    return [
        Choice(generation, Splitter(form, rendered.thinking), backend.llm.stop_tokens, len(rendered.tokens))
        for generation in generations
    ]


def count_tokens(backend: Backend, call: ChatCall) -> int:
    """How many tokens the prompt of `call` has."""
    return len(render(backend, call).tokens)


def _prepare(backend: Backend, call: ChatCall) -> tuple[Rendered, list[Constraint | None]]:
    rendered = render(backend, call)
    constraint = constraint_for(backend, call, rendered.thinking)
    copies = [constraint.copy() if constraint is not None else None for _ in range(call.n)]
    return rendered, [*copies]
