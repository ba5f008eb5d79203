"""POST /tokenize and POST /detokenize: text to token ids and back, in llama.cpp's form and in vLLM's.

{"content": text}                       -> {"tokens": [...]}                              llama.cpp
{"prompt": text}, {"messages": [...]}   -> {"tokens": [...], "count", "max_model_len"}    vLLM
{"tokens": [...]}                       -> {"content": text, "prompt": text}              both
"""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field

from ..models.detokenizer import token_bytes
from .backend import Backend
from .body import Body, JsonObject, Str
from .call import ChatCall
from .errors import BadRequestError
from .models.choose import choose
from .openai import schema
from .prompt import render

router = APIRouter()


class TokenizeBody(Body):
    """`content` is llama.cpp's, without special tokens around it unless asked for; the others are vLLM's, with them."""

    model: Str | None = None
    content: Str | None = None
    add_special: bool = False
    parse_special: Literal[True] | None = None
    with_pieces: bool = False
    prompt: Str | None = None
    add_special_tokens: bool = True
    messages: Annotated[list[schema.Message], Field(min_length=1)] | None = None
    tools: list[schema.Tool] | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: Str | None = None
    tokens: list[int]


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
    backend = await choose(request, body.model)
    return await asyncio.to_thread(_tokenized, backend, body)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, str]:
    backend = await choose(request, body.model)
    try:
        tokens = backend.encode(body.tokens)
    except BadRequestError as error:
        error.field = "tokens"
        raise
    text = await asyncio.to_thread(backend.tokenizer.decode, tokens)
    return {"content": text, "prompt": text}


def _tokenized(backend: Backend, body: TokenizeBody) -> dict[str, Any]:
    given = [name for name in ("content", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise BadRequestError("set one of content, prompt and messages", given[0] if given else "content")
    if body.content is not None:
        tokens = _encoded(backend, body.content, body.add_special)
        return {"tokens": _pieces(backend, tokens) if body.with_pieces else tokens}
    if body.prompt is not None:
        tokens = _encoded(backend, body.prompt, body.add_special_tokens)
    else:
        messages = [message.as_message() for message in body.messages or []]
        tools = [tool.function.as_tool() for tool in body.tools or []]
        tokens = render(backend, ChatCall(messages, tools, template=body.chat_template_kwargs or {})).tokens
    strings = backend.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": backend.longest, "tokens": tokens, "token_strs": strings}


def _encoded(backend: Backend, text: str, special: bool) -> list[int]:
    return [int(token) for token in backend.tokenizer.encode(text, add_special_tokens=special)]


def _pieces(backend: Backend, tokens: list[int]) -> list[dict[str, Any]]:
    """Part of a character is given as bytes."""
    pieces = []
    for token, piece in zip(tokens, token_bytes(backend.tokenizer, tokens), strict=True):
        try:
            pieces.append({"id": token, "piece": piece.decode()})
        except UnicodeDecodeError:
            pieces.append({"id": token, "piece": list(piece)})
    return pieces
