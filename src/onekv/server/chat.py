"""From a `ChatCall` to what is generated for it, and from what the engine emits to typed deltas.

A call is rendered with the model's own chat template to tokens; a choice's text is split into reasoning, content and
tool calls as it comes. Tools: where the template knows tools, it renders them and mlx-lm's parser for that template
reads the calls; else they are described in the system message and called as <tool_call>{json}</tool_call>. A call that
must be made (`tool_choice` "required" or a name) and JSON that must fit a schema are enforced token by token.
"""

from collections.abc import Container

from ..engine import Delta, End
from .answer import Prepared
from .backend import Backend, Generation
from .call import ChatCall
from .constrain import constraint_for
from .deltas import Finish, TextDelta, ToolCallDelta, TypedDelta
from .prompt import markers_of, render
from .segments import Splitter


class ChatChoice:
    """Reads one choice."""

    def __init__(self, splitter: Splitter, stop_tokens: Container[int]) -> None:
        self._splitter, self._stop_tokens = splitter, stop_tokens
        self._called = False
        self._reasoning_tokens = 0

    def read(self, event: Delta | End) -> list[TypedDelta]:
        if isinstance(event, End):
            found = self._counted(self._splitter.finish())
            return [*found, Finish.of(event, self._called, self._reasoning_tokens)]
        # The token that ends an answer is no part of it.
        shown = [index for index, token in enumerate(event.tokens) if token not in self._stop_tokens]
        tokens = [event.tokens[index] for index in shown]
        logprobs = [event.logprobs[index] for index in shown if event.logprobs]
        return [*self._counted(self._splitter.feed(event.text, tokens, logprobs))]

    def _counted(self, found: list[TextDelta | ToolCallDelta]) -> list[TextDelta | ToolCallDelta]:
        for delta in found:
            if isinstance(delta, ToolCallDelta):
                self._called = True
            elif delta.kind == "reasoning":
                self._reasoning_tokens += len(delta.tokens)
        return found


def prepare(backend: Backend, call: ChatCall) -> Prepared:
    """The `call.n` choices of an answer. Raises BadRequestError for what cannot be rendered or enforced."""
    rendered = render(backend, call)
    constraint = constraint_for(backend, call, rendered.thinking)
    markers = markers_of(backend.tokenizer, call)
    generations = [
        Generation(
            rendered.tokens,
            call.max_tokens,
            call.sampling.of_answer(index),
            call.stops,
            call.top_logprobs,
            constraint.copy() if constraint is not None else None,
            call.salt,
            call.clamp,
        )
        for index in range(call.n)
    ]
    choices = [ChatChoice(Splitter(markers, rendered.thinking), backend.llm.stop_tokens) for _ in generations]
    return Prepared(generations, [*choices])
