"""Whatever fits the server's own OpenAPI document, or almost does, is answered: no request makes it fail."""

import zlib
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

EXAMPLES, FEW_TOKENS = 12, 3
OLLAMA = ("/api/chat", "/api/generate")
ANSWERING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", *OLLAMA)
MEANINGFUL = {"messages": [{"role": "user", "content": "Hello."}], "prompt": "Hello.", "input": "Hello."}
# These must fit each other, or the model.
RARELY_RIGHT = {
    "logit_bias",
    "tools",
    "tool_choice",
    "previous_response_id",
    "response_format",
    "output_config",
    "text",
    "format",
    *("images", "suffix", "template", "context"),
}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def answerable(path: str, body: dict[str, Any], model: str) -> dict[str, Any]:
    """`body` for few and short answers, mostly of the model there is; half of them with a prompt that has a meaning.

    What is of the wrong type stays wrong.
    """
    # By what it says, not by chance: the same body is always the same request.
    choice = zlib.crc32(repr(body).encode())
    changed = dict(body)
    if isinstance(body.get("model"), str) and choice % 8:
        changed["model"] = model
    for name in LIMITS:
        given = body.get(name)
        if given is None or (type(given) is int and given > FEW_TOKENS):
            changed[name] = FEW_TOKENS
    if path in OLLAMA and isinstance(body.get("options") or {}, dict):
        changed["options"] = {**(body.get("options") or {}), "num_predict": FEW_TOKENS}
    if type(body.get("n")) is int and body["n"] > 2:
        changed["n"] = 2
    if isinstance(body.get("prompt"), list):
        changed["prompt"] = body["prompt"][:2]
    if choice % 2:
        for name in RARELY_RIGHT & body.keys():
            del changed[name]
        changed |= {name: value for name, value in MEANINGFUL.items() if isinstance(body.get(name), str | list)}
    return changed


@pytest.mark.parametrize("mode", GenerationMode)
def test_nothing_fails(server: Any, mode: GenerationMode) -> None:
    headers = {"Authorization": f"Bearer {server.keys[0]}"}
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=headers, wait_for_schema=10)
    seen: dict[str, Counter[int]] = {}
    for operation in (found.ok() for found in document.get_all_operations()):
        # There is no wrong way to call what takes no body.
        if mode == GenerationMode.POSITIVE or operation.body:
            seen[operation.label] = attempt_all(operation, mode, server)
            answering = mode == GenerationMode.POSITIVE and operation.path in ANSWERING
            for _ in range(4 if answering else 0):
                # The examples are fresh ones: by chance the first may all be refused.
                if 200 not in seen[operation.label]:
                    seen[operation.label] += attempt_all(operation, mode, server)
    if mode == GenerationMode.POSITIVE:
        assert all(200 in seen[f"POST {path}"] for path in ANSWERING), seen


def attempt_all(operation: Any, mode: GenerationMode, server: Any) -> Counter[int]:
    """How often which status was answered."""
    headers = {"Authorization": f"Bearer {server.keys[0]}"}
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def attempt(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = answerable(operation.path, case.body, server.backend_name)
        answer = case.call_and_validate(headers=headers, checks=[not_a_server_error], timeout=120)
        statuses[answer.status_code] += 1

    attempt()
    return statuses
