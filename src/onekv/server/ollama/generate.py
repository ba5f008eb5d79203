"""POST /api/generate: answers a single prompt, rendered with the chat template, or with `raw` used as it is; with
`suffix`, fills in the text between both.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..answer import AnswerResponse, Prepared
from ..backend import Backend, Generation
from ..call import ChatCall
from ..chat import ChatChoice, prepare
from ..constrain import constraint_for
from ..deltas import TypedDelta
from ..infill import around
from ..segments import Markers, Splitter
from .convert import call_of, chosen
from .output import OllamaAnswer, text_of
from .schema import GenerateBody

router = APIRouter()


@router.post("/api/generate")
async def generate(body: GenerateBody, request: Request) -> Response:
    backend = await chosen(request, body.model)
    answer = GenerateAnswer(backend, body)
    if not body.prompt:
        return answer.loaded(body.streams)
    system = [{"role": "system", "content": body.system}] if body.system else []
    call = call_of(backend, body, request.state.salt, [*system, {"role": "user", "content": body.prompt}])
    prepared = partial(prepare, backend, call)
    if body.raw or body.suffix:
        prepared = partial(_prepare_raw, backend, call, body.prompt, body.suffix or "")
    return AnswerResponse(request, answer, prepared, body.streams)


def _prepare_raw(backend: Backend, call: ChatCall, prompt: str, suffix: str) -> Prepared:
    constraint = constraint_for(backend, call, thinking=False)
    tokens = around(backend, prompt, suffix) if suffix else backend.encode(prompt)
    wanted = Generation(
        tokens, call.max_tokens, call.sampling, call.stops, call.top_logprobs, constraint, call.salt, call.clamp
    )
    # Without markers all text is content.
    return Prepared([wanted], [ChatChoice(Splitter(Markers()), backend.llm.stop_tokens)])


class GenerateAnswer(OllamaAnswer):
    def _said(self, deltas: Iterable[TypedDelta]) -> dict[str, Any]:
        deltas = list(deltas)
        thinking = text_of(deltas, "reasoning")
        return {"response": text_of(deltas, "content"), **({"thinking": thinking} if thinking else {})}
