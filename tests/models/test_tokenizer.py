"""Tokenizers built from GGUF metadata: the original's ids, exact round trips, exact streaming."""

import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import pytest
import sentencepiece
from gguf_files import Spec, byte_tokens, write

from onekv.errors import ModelFormatError
from onekv.models.gguf_header import read_header
from onekv.models.gguf_tokenizer import build_tokenizer

TEXTS = [
    "Hello, world!",
    " leading and trailing ",
    "naïve café, Ærøskøbing, 日本語のテキスト, Привет",
    "👩‍👩‍👧 family 🎉 and \u200b zero width",
    "def f(x):\n\treturn  x ** 2   # spaces\r\n\n\n",
    "It's 12345 o'clock; WE'LL see 3.14159",
    "a\x00b\x7f",
    "",
    "\n",
]


def stream(tokenizer: Any, ids: Iterable[int]) -> str:
    """The text that arrives piece by piece."""
    detokenizer = tokenizer.detokenizer
    pieces = []
    for token in ids:
        detokenizer.add_token(token)
        pieces.append(detokenizer.last_segment)
    detokenizer.finalize()
    pieces.append(detokenizer.last_segment)
    return "".join(pieces)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Any:
    return build_tokenizer(read_header(smollm2_path))


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_round_trip_and_stream(smollm2: Any, text: str) -> None:
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    assert stream(smollm2, ids) == text


def test_smollm2_known_ids(smollm2: Any) -> None:
    assert len(smollm2) == 49152
    assert smollm2.encode("<|im_start|>user") == [1, 4093]
    assert smollm2.encode("<|endoftext|><|im_end|>") == [0, 2]
    assert smollm2.bos_token == "<|im_start|>" and smollm2.eos_token == "<|im_end|>"
    assert smollm2.eos_token_ids == {0, 2}
    assert smollm2.pad_token_id == 2


def test_smollm2_digits_are_single_tokens(smollm2: Any) -> None:
    ids = smollm2.encode("90210")
    assert smollm2.convert_ids_to_tokens(ids) == list("90210")


def test_smollm2_adds_no_bos(smollm2: Any) -> None:
    assert smollm2.encode("Hello") == smollm2.encode("Hello", add_special_tokens=False)


def test_smollm2_merges_in_the_order_of_the_file(smollm2_path: Path, smollm2: Any) -> None:
    """Byte pairs merged by hand, lowest rank first, give the same tokens."""
    metadata = read_header(smollm2_path).metadata
    ranks = {tuple(m.split(" ")): r for r, m in enumerate(metadata["tokenizer.ggml.merges"])}
    for word in ("Ġextraordinary", "Ġtokenization", "Ġantidisestablishmentarianism", "naÃ¯ve"):
        parts = list(word)
        while True:
            pairs = [(ranks.get(pair, 1 << 60), i) for i, pair in enumerate(pairwise(parts))]
            rank, at = min(pairs, default=(1 << 60, 0))
            if rank == 1 << 60:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        text = smollm2.convert_tokens_to_string([word])
        assert smollm2.convert_ids_to_tokens(smollm2.encode(text)) == parts


def test_smollm2_chat_template(smollm2: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = smollm2.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == smollm2.encode(text)
    assert ids.count(1) == 3 and ids.count(2) == 2


def test_smollm2_skips_special_tokens(smollm2: Any) -> None:
    ids = smollm2.encode("<|im_start|>Hi<|im_end|>")
    assert smollm2.decode(ids, skip_special_tokens=True) == "Hi"


def test_streams_of_random_ids_equal_decode(smollm2: Any) -> None:
    """Also where characters are cut, bytes are invalid and special tokens stand between."""
    chance = random.Random(1)
    for _ in range(50):
        ids = [chance.choice((chance.randrange(49152), chance.randrange(300))) for _ in range(40)]
        assert stream(smollm2, ids) == smollm2.decode(ids)


def test_detokenizers_do_not_share_state(smollm2: Any) -> None:
    one, two = smollm2.detokenizer, smollm2.detokenizer
    one.add_token(smollm2.encode("🎉")[0])
    two.add_token(smollm2.encode("ok")[0])
    assert (one.text, two.text) == ("", "ok")


def build(path: Path, **spec: Any) -> Any:
    write(path, Spec(**spec))
    return build_tokenizer(read_header(path))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "Ġ", "Ġ12345", "ĠWE", "'", "LL"]),
        ("default", ["It", "'s", "Ġ", "Ġ12345", "ĠWE", "'", "LL"]),
        ("smollm", ["It", "'s", "ĠĠ", "1", "2", "3", "4", "5", "ĠWE", "'", "LL"]),
        ("qwen2", ["It", "'s", "Ġ", "Ġ", "1", "2", "3", "4", "5", "ĠWE", "'LL"]),
        ("llama-bpe", ["It", "'s", "Ġ", "Ġ", "123", "45", "ĠWE", "'LL"]),
    ],
)
def test_text_is_cut_as_the_original_does(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = build(tmp_path / "m.gguf", pre=pre)
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("It's  12345 WE'LL")
    assert [piece for piece, _ in cut] == pieces
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert stream(tokenizer, ids) == text


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    tokenizer = build(tmp_path / "m.gguf", pre="qwen2")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"


def test_merges_are_used(tmp_path: Path) -> None:
    tokenizer = build(tmp_path / "m.gguf")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello w")) == ["hello", "Ġw"]


@pytest.mark.parametrize(
    ("pre", "setting", "adds"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_bos_as_the_file_says(tmp_path: Path, pre: str, setting: bool | None, adds: bool) -> None:
    extra = {"tokenizer.ggml.add_bos_token": setting}
    tokenizer = build(tmp_path / "m.gguf", pre=pre, extra=extra)
    assert (tokenizer.encode("hello")[0] == 1) is adds
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != 1


def test_end_tokens_are_collected(tmp_path: Path) -> None:
    tokens = [*byte_tokens(), "<|eot_id|>", "<stop>"]
    extra = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 4) + [3, 3],
        "tokenizer.ggml.eot_token_id": len(tokens) - 1,
    }
    tokenizer = build(tmp_path / "m.gguf", extra=extra)
    assert tokenizer.eos_token_ids == {0, len(tokens) - 2, len(tokens) - 1}


def test_user_defined_tokens_are_whole_but_not_special(tmp_path: Path) -> None:
    tokens = [*byte_tokens(), "<think>"]
    extra = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 3) + [4],
    }
    tokenizer = build(tmp_path / "m.gguf", extra=extra)
    ids = tokenizer.encode("he<think>")
    assert ids[-1] == len(tokens) - 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he<think>"


def test_tool_calls_are_recognised(tmp_path: Path) -> None:
    template = "{{ tool_call.name }} <tool_call> </tool_call>"
    tokenizer = build(tmp_path / "m.gguf", extra={"tokenizer.chat_template": template})
    assert tokenizer.has_tool_calling and tokenizer.tool_call_start == "<tool_call>"


REFUSED = [
    ({"tokenizer.ggml.model": "bert"}, "'bert'"),
    ({"tokenizer.ggml.model": None}, "None"),
    ({"tokenizer.ggml.pre": "tekken"}, "'tekken'"),
    ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "twice"),
    ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.token_type": [1, 2]}, "token_type"),
    ({"tokenizer.ggml.merges": ["q zz"]}, "q zz"),
    ({"tokenizer.ggml.merges": None}, "merges"),
    ({"tokenizer.ggml.eos_token_id": 99999}, "eos_token_id"),
    ({"tokenizer.ggml.model": "llama"}, "scores"),
]


@pytest.mark.parametrize(("extra", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_unknown_tokenizers_are_refused_by_name(tmp_path: Path, extra: Any, named: str) -> None:
    with pytest.raises(ModelFormatError, match=named):
        build(tmp_path / "m.gguf", extra=extra)


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """A real SentencePiece model, trained as Llama's was: BPE, bytes for unknown characters."""
    folder = tmp_path_factory.mktemp("spm")
    chance = random.Random(5)
    words = ["the", "model", "keeps", "every", "token", "of", "a", "long", "chat", "exactly", "once"]
    words += ["in", "memory", "and", "shares", "it"]
    lines = [" ".join(chance.choices(words, k=12)) for _ in range(300)]
    (folder / "text").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=380,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


def write_spm(path: Path, spm: Any, **extra: Any) -> None:
    """As llama.cpp's converter writes a SentencePiece model."""
    count = spm.get_piece_size()
    kinds = [2 if spm.is_unknown(i) else 3 if spm.is_control(i) else 6 if spm.is_byte(i) else 1 for i in range(count)]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [spm.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": [float(spm.get_score(i)) for i in range(count)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": spm.unk_id(),
        "tokenizer.ggml.bos_token_id": spm.bos_id(),
        "tokenizer.ggml.eos_token_id": spm.eos_id(),
    } | extra
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        gguf_files.add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


SPM_TEXTS = [
    "the model keeps every token",
    "exactly  once   in memory",
    " shares a long chat",
    "modelling tokenization, unheard-of!",
    "naïve 日本 🎉",
    "line\nbreak\ttab",
]


def test_sentencepiece_ids_equal_the_original(tmp_path: Path, spm: Any) -> None:
    write_spm(tmp_path / "m.gguf", spm)
    tokenizer = build_tokenizer(read_header(tmp_path / "m.gguf"))
    chance = random.Random(2)
    made = ["".join(chance.choices("thekmodlys a", k=30)) for _ in range(200)]
    for text in [*SPM_TEXTS, *made]:
        ids = spm.encode(text)
        assert tokenizer.encode(text) == [spm.bos_id(), *ids]
        assert tokenizer.decode(ids) == stream(tokenizer, ids) == spm.decode(ids) == text


def test_sentencepiece_without_space_prefix(tmp_path: Path, spm: Any) -> None:
    settings = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    write_spm(tmp_path / "m.gguf", spm, **settings)
    tokenizer = build_tokenizer(read_header(tmp_path / "m.gguf"))
    for text in SPM_TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == stream(tokenizer, ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the"))[0][0] != "▁"
