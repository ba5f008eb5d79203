"""The server: a real process on a free port, with two concurrent clients that use plain HTTP."""

import http.client
import json
import socket
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..bench.clients import KEYS, LOCAL, ServerProcess, onekv_server, save
from ..errors import OneKVError
from .base import Case, Check, Notes, switch
from .models import KINDS, SEED, random_model

# Packages of the extra `server`.
NEEDS = ("fastapi", "starlette", "uvicorn", "h11", "pydantic", "prometheus_client", "llguidance")
# CUDA kernels are compiled at the start, and some by the first answer.
START_S, ANSWER_S = 240.0, 120.0
TOKENS = 16
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTION = "Client {0} asks something that is long enough for a few blocks of the cache to hold. " * 4


def run(case: Case, notes: Notes) -> None:
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        notes.skip(f"{missing[0]} is not installed; run pip install 'onekv[server]'")
        return
    _port(case, notes)
    with tempfile.TemporaryDirectory(prefix="onekv-doctor-") as folder:
        save_chat_model(Path(folder))
        case.doing("starting a server")
        flags = ("--kv-memory", "16MB", "--block-size", "16", "--kernels", case.settings.kernels)
        with onekv_server(folder, *flags, start_s=START_S) as server:
            _talk(server, notes)


def _port(case: Case, notes: Notes) -> None:
    """Whether the port of `onekv serve` is free."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOCAL, case.port))
        except OSError as error:
            notes.warn(f"`onekv serve` cannot listen on port {case.port}: {error.strerror}", switch("port", "PORT"))


# Model


def save_chat_model(folder: Path) -> None:
    """Save a small random model with a character-level tokenizer in mlx-lm's format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Byte-level spelling of printable ASCII, space and newline.
    characters = (*map(chr, range(33, 127)), "Ġ", "Ċ")
    tokens = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate((*SPECIAL, *characters))}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=SPECIAL[0], additional_special_tokens=list(SPECIAL[1:])
    )
    tokenizer.chat_template = TEMPLATE
    config = {**KINDS["full attention"], "vocab_size": len(SPECIAL) + len(characters)}
    save(folder, random_model(config, SEED), config, tokenizer)


# Clients


@dataclass(frozen=True)
class Talk:
    """The second turn of a conversation: its answer, the same streamed, and the number of cached tokens."""

    whole: str
    streamed: str
    cached: int


def _talk(server: ServerProcess, notes: Notes) -> None:
    with ThreadPoolExecutor(len(KEYS)) as pool:
        talks = list(pool.map(lambda number: _client(server, number), range(len(KEYS))))
    for number, talk in enumerate(talks, 1):
        notes.figure(f"client {number}, second turn cached", talk.cached, "tokens")
        if not talk.cached:
            notes.fail(
                f"client {number}: the second turn found nothing of the first in the cache",
                switch("prefix_cache", "off"),
            )
        if talk.streamed != talk.whole:
            notes.fail(
                f"client {number}: the streamed answer differs: {talk.streamed!r} instead of {talk.whole!r}",
                switch("kernels", "off"),
            )
    if all(talk.cached and talk.streamed == talk.whole for talk in talks):
        notes.ok("two concurrent clients: second turns cached, streamed and whole answers equal")


def _client(server: ServerProcess, number: int) -> Talk:
    messages = [{"role": "user", "content": QUESTION.format(number)}]
    first = _post(server, number, messages)
    said = first["choices"][0]["message"]["content"] or "."
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    second = _post(server, number, messages)
    streamed = "".join(_stream(server, number, messages))
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Talk(second["choices"][0]["message"]["content"] or "", streamed, cached)


def _post(server: ServerProcess, number: int, messages: list[dict[str, str]]) -> dict[str, Any]:
    with _asked(server, number, messages, stream=False) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _stream(server: ServerProcess, number: int, messages: list[dict[str, str]]) -> Iterator[str]:
    with _asked(server, number, messages, stream=True) as answer:
        for line in answer:
            if line.startswith(b"data:") and line.strip() != b"data: [DONE]":
                for choice in json.loads(line[5:])["choices"]:
                    yield choice["delta"].get("content") or ""


def _asked(
    server: ServerProcess, number: int, messages: list[dict[str, str]], stream: bool
) -> http.client.HTTPResponse:
    body = {"model": server.model, "messages": messages, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
    headers = {"Authorization": f"Bearer {KEYS[number]}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    # Local requests must not go through a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        answer: http.client.HTTPResponse = opener.open(request, timeout=ANSWER_S)
    except urllib.error.HTTPError as error:
        said = error.read()[:300].decode("utf-8", "replace")
        raise OneKVError(f"the server answered {error.code}: {said}") from error
    return answer


CHECK = Check("server", "a server with two clients: second turns cached, streamed and whole answers equal", run)
