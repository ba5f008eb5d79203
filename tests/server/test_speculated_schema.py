"""JSON that fits a schema, with speculation: the grammar hears of every token before the next one is drawn."""

import json

import pytest
from test_constrain import Model

from onekv.config import Settings
from onekv.engine import Engine, Request, Sampling
from onekv.memory.plan import make_plan
from onekv.models import load_model
from onekv.server.call import ChatCall
from onekv.server.constrain import constraint_for
from proposers import Oracle, speculate

SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 2,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
                "required": ["name", "age"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}
PROMPT = 'Three people as JSON: {"people": [{"name": "Ada", "age": 36}, {"name": "Emil", "age": 7}]}\nThe same again: '


@pytest.mark.usefixtures("smollm2_path")
def test_answers_in_a_form_are_those_without_speculation():
    loaded = load_model("smollm2-135m", progress=False)
    tokenizer = loaded.tokenizer
    stops = set(tokenizer.eos_token_ids)
    backend = Model()
    grammar = constraint_for(backend, ChatCall([{"role": "user", "content": "Hi"}], schema=SCHEMA), False)
    prompt = [int(token) for token in tokenizer.encode(PROMPT)]

    def engine(how: str) -> Engine:
        settings = Settings(kv_memory="32MB", max_batch=2, speculate=how)
        return Engine(loaded.model, make_plan(loaded.model, settings, None), stops, settings)

    def answers(runs: Engine, known: list[Request]) -> list[Request]:
        requests = [Request(prompt, 60, Sampling(temperature=each, seed=3)) for each in (0.0, 0.7)]
        for request in requests:
            request.constraint = grammar.copy()
        for request, answer in zip(requests, known, strict=False):
            runs.speculation.proposer.know(request, answer.tokens)
        for request in requests:
            runs.submit(request)
        while not runs.idle:
            runs.step()
        runs.check_integrity()
        assert not any(request.error for request in requests)
        return requests

    plain = answers(engine("off"), [])
    assert all(len(json.loads(tokenizer.decode(own.tokens[:-1]))["people"]) >= 2 for own in plain)
    for runs, known in ((speculate(engine("auto"), None), []), (speculate(engine("auto"), Oracle(0.8, 49152)), plain)):
        guessed = answers(runs, known)
        assert [own.tokens for own in guessed] == [own.tokens for own in plain]
        assert [own.finish_reason for own in guessed] == ["stop", "stop"]
        assert runs.speculation.stats().accepted > 10
