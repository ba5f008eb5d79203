"""/tokenize and /detokenize, in llama.cpp's form and in vLLM's."""

from typing import Any

import httpx2 as httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from onekv.models.detokenizer import token_bytes

TEXT = "Grüße, 世界! 🙂 <|im_start|>"


def post(server: Any, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers={"x-api-key": server.keys[1]}, timeout=60)


def test_there_and_back(server: Any) -> None:
    tokens = post(server, "/tokenize", content=TEXT).json()
    assert list(tokens) == ["tokens"] and 1 in tokens["tokens"], "special tokens are read as such"
    assert post(server, "/detokenize", tokens=tokens["tokens"]).json() == {"content": TEXT, "prompt": TEXT}
    assert post(server, "/detokenize", tokens=[]).json()["content"] == ""


def test_pieces_are_text_or_the_bytes_of_a_part_of_a_character(server: Any) -> None:
    pieces = post(server, "/tokenize", content=TEXT, with_pieces=True).json()["tokens"]
    assert [piece["id"] for piece in pieces] == post(server, "/tokenize", content=TEXT).json()["tokens"]
    kinds = {type(piece["piece"]) for piece in pieces}
    assert kinds == {str, list}, "one token of the emoji is no text"
    joined = b"".join(
        piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"]) for piece in pieces
    )
    assert joined.decode() == TEXT


def test_a_prompt_and_messages_are_counted(server: Any) -> None:
    prompt = post(server, "/tokenize", prompt="Hello there", model=server.backend_name, return_token_strs=True).json()
    assert prompt["count"] == len(prompt["tokens"]) == 2 and prompt["token_strs"] == ["Hello", "Ġthere"]
    messages = [{"role": "user", "content": "Hello there"}]
    talk = post(server, "/tokenize", messages=messages).json()
    assert talk["max_model_len"] == prompt["max_model_len"] > 1000 and talk["token_strs"] is None
    text = post(server, "/detokenize", tokens=talk["tokens"]).json()["prompt"]
    assert text.endswith("<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n")
    body = {"model": server.backend_name, "messages": messages, "max_tokens": 1}
    assert post(server, "/v1/chat/completions", **body).json()["usage"]["prompt_tokens"] == talk["count"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "x", "prompt": "y"}, "content"),
        ("/tokenize", {"content": "x", "parse_special": False}, "parse_special"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(server: Any, path: str, body: dict[str, Any], field: str) -> None:
    answer = post(server, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_an_unknown_model_is_refused(server: Any) -> None:
    for path, body in (("/tokenize", {"content": "x"}), ("/detokenize", {"tokens": [1]})):
        assert post(server, path, model="nothing", **body).status_code == 404


def test_bytes_of_the_other_kind_of_tokens() -> None:
    """Of a tokenizer in which U+2581 is a space and <0xNN> a byte."""
    vocabulary = {token: index for index, token in enumerate(["<unk>", "▁", "é", "Ġ", "<0xF0>", "▁a"])}
    core = Tokenizer(BPE(vocabulary, [], unk_token="<unk>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    assert token_bytes(fast, [2, 3, 4, 5, 0]) == ["é".encode(), "Ġ".encode(), b"\xf0", b" a", b"<unk>"]
