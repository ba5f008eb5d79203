"""From a `ChatCall` to its generations, and from what the engine emits to typed deltas.

A call is rendered to tokens with the model's own chat template; a choice's text is split into reasoning, content and
tool calls as it arrives. Tools: if the template supports tools, it renders them and mlx-lm's parser for that template
parses the calls; otherwise they are described in the system message and called as <tool_call>{json}</tool_call>. A
mandatory call (`tool_choice` "required" or a name) and JSON schemas are enforced token by token.
"""

from collections.abc import Callable, Container

from ..ask import encode_prediction
from ..engine import Delta, End
from . import journal
from .answer import Prepared
from .backend import Backend, Generation
from .call import ChatCall
from .constrain import constraint_for
from .deltas import Finish, TextDelta, ToolCallDelta, TypedDelta
from .messages import continues
from .prompt import markers_of, render
from .segments import Found, Splitter
from .turns import Said


class ChatChoice:
    """Reads one choice, and remembers what it was."""

    def __init__(
        self,
        splitter: Splitter,
        stop_tokens: Container[int],
        one_call: str | None = None,
        remember: Callable[[Said, list[int]], None] | None = None,
    ) -> None:
        """`one_call` is the marker that ends the first call, which ends the choice; empty where calls have none, and
        whatever comes after the first is left out; None if there may be several. `remember` is told what the choice
        says, and the tokens that say it, when it has ended by itself; None where it is no turn of a conversation.
        """
        self._splitter, self._stop_tokens, self._one_call = splitter, stop_tokens, one_call
        self._remember = remember
        self._called = False
        self._reasoning_tokens = 0
        self._tokens: list[int] = []
        self._said: list[TypedDelta] = []

    def read(self, event: Delta | End) -> list[TypedDelta]:
        if isinstance(event, End):
            found = self._counted(self._splitter.finish(cut_off=event.finish_reason == "length"))
            # Text cut at a stop string has tokens that were not sent; the end of a call was sent.
            if event.stopped_by in (None, self._one_call) and self._remember is not None:
                self._remember(Said.of_deltas(self._said), self._tokens)
            return [*found, Finish.of(event, self._called, self._reasoning_tokens)]
        # The token that ends an answer is no part of it.
        shown = [index for index, token in enumerate(event.tokens) if token not in self._stop_tokens]
        tokens = [event.tokens[index] for index in shown]
        self._tokens += tokens
        logprobs = [event.logprobs[index] for index in shown if event.logprobs]
        return [*self._counted(self._splitter.feed(event.text, tokens, logprobs))]

    def _counted(self, found: list[Found]) -> list[Found]:
        shown = []
        for delta in found:
            if isinstance(delta, TextDelta) and delta.kind == "reasoning":
                self._reasoning_tokens += len(delta.tokens)
            if not (self._called and self._one_call is not None):
                shown.append(delta)
            self._called |= isinstance(delta, ToolCallDelta)
        self._said += shown
        return shown


def prepare(backend: Backend, call: ChatCall) -> Prepared:
    """The `call.n` choices of an answer. Raises BadRequestError for what cannot be rendered or enforced."""
    rendered = render(backend, call)
    backend.metrics.cleaned(rendered.cleaned)
    if (entry := journal.current.get()) is not None:
        entry.cleaned = rendered.cleaned
    constraint = constraint_for(backend, call, rendered.thinking)
    markers = markers_of(backend.tokenizer, call)
    prediction = encode_prediction(call.prediction, backend.tokenizer)
    # The end of the first call ends the answer; its text is then complete without its marker.
    one_call = (markers.call_end or "") if call.one_call else None
    stops = (*call.stops, *([one_call] if one_call else []))
    generations = [
        Generation(
            rendered.tokens,
            call.max_tokens,
            call.sampling.of_answer(index),
            stops,
            call.top_logprobs,
            constraint.copy() if constraint is not None else None,
            call.salt,
            call.clamp,
            prediction=prediction,
        )
        for index in range(call.n)
    ]
    stop_tokens, opening = backend.llm.stop_tokens, rendered.tokens[len(rendered.tokens) - rendered.opening :]

    def remember(said: Said, tokens: list[int]) -> None:
        # In a later prompt the template does not open the reasoning: that is part of the turn.
        backend.turns.remember(call.salt, rendered.messages, said, [*opening, *tokens])

    def choice() -> ChatChoice:
        splitter = Splitter(markers, rendered.thinking)
        return ChatChoice(splitter, stop_tokens, one_call, None if continues(call) else remember)

    return Prepared(generations, [choice() for _ in generations], call)
