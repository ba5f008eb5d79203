"""The tokenizer inside a GGUF file, built with `tokenizers` and wrapped as mlx-lm wants it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ..errors import ModelFormatError
from .detokenizer import ByteLevelDetokenizer, SentencePieceDetokenizer
from .gguf_header import GGUFHeader
from .templates import tool_parser

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> how text is cut before byte pairs are merged.
_GPT2, _SMOLLM, _QWEN2, _LLAMA3 = "gpt-2", "smollm", "qwen2", "llama-bpe"
_PRE = {
    "default": _GPT2, "gpt-2": _GPT2, "smollm": _SMOLLM, "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
}  # fmt: skip
# Control tokens that end an answer whatever tokenizer.ggml.eos_token_id says.
_END_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<end_of_turn>")


def build_tokenizer(header: GGUFHeader) -> TokenizerWrapper:
    """The file's tokenizer, with its chat template, special tokens and a streaming detokenizer.

    BOS is added as `tokenizer.ggml.add_bos_token` says. EOS never is: nothing follows it. Raises
    ModelFormatError, by name, for a kind of tokenizer that is not known exactly.
    """
    return _Builder(header).wrapped()


class _Builder:
    def __init__(self, header: GGUFHeader):
        self.header = header
        self.model = header.metadata.get("tokenizer.ggml.model")
        self.tokens: list[str] = self.strings("tokens")
        self.types = self.numbers("token_type", default=_NORMAL)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise self.fail("tokenizer.ggml.tokens has the same token twice")
        self.pre = ""
        if self.model == "gpt2":
            self.pre = self.known_pre()
        elif self.model != "llama":
            raise self.fail(f"tokenizer {self.model!r} is not supported, only gpt2 and llama")
        self.space_prefix = bool(self.get("add_space_prefix", True))

    def fail(self, what: str) -> ModelFormatError:
        return ModelFormatError(f"{self.header.path}: {what}")

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"tokenizer.ggml.{key}", default)

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(f"metadata tokenizer.ggml.{key} is missing or not a list of strings")
        return value

    def numbers(self, key: str, default: float | None = None) -> list[Any]:
        """One number for each token."""
        value = self.get(key)
        if value is None and default is not None:
            return [default] * len(self.tokens)
        if not hasattr(value, "tolist") or len(value) != len(self.tokens):
            raise self.fail(f"metadata tokenizer.ggml.{key} does not have one number for each token")
        numbers: list[Any] = value.tolist()
        return numbers

    def token(self, name: str) -> str | None:
        """The text of a special token such as `bos`, or None if the file names none."""
        index = self.get(f"{name}_token_id")
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise self.fail(f"tokenizer.ggml.{name}_token_id is {index!r}, which is not a token")
        return self.tokens[index]

    def known_pre(self) -> str:
        name = self.get("pre", "default")
        if name not in _PRE:
            raise self.fail(f"pre-tokenizer {name!r} is not supported, only {', '.join(_PRE)}")
        return _PRE[name]

    def wrapped(self) -> TokenizerWrapper:
        core = self.byte_level() if self.model == "gpt2" else self.sentencepiece()
        core.add_special_tokens(self.added(_CONTROL))
        core.add_tokens(self.added(_USER_DEFINED))
        bos = self.token("bos")
        if bos is not None and self.adds_bos():
            core.post_processor = TemplateProcessing(
                single=[bos, "$A"],
                pair=[bos, "$A", bos, "$B:1"],
                special_tokens=[(bos, self.ids[bos])],
            )
        names = {"bos": bos} | {
            full: self.token(short) for full, short in (("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        }
        template = self.header.metadata.get("tokenizer.chat_template")
        fast = PreTrainedTokenizerFast(
            tokenizer_object=core,
            clean_up_tokenization_spaces=False,
            **{f"{name}_token": text for name, text in names.items() if text is not None},
        )
        fast.chat_template = template if isinstance(template, str) else None
        return TokenizerWrapper(fast, self.detokenizer(), eos_token_ids=self.end_ids(), **tool_parser(fast))

    def added(self, kind: int) -> list[AddedToken]:
        special = kind == _CONTROL
        return [
            AddedToken(token, special=special, normalized=False)
            for token, token_kind in zip(self.tokens, self.types, strict=True)
            if token_kind == kind
        ]

    def adds_bos(self) -> bool:
        # Where the file is silent: what llama.cpp does.
        return bool(self.get("add_bos_token", self.model == "llama" or self.pre == _LLAMA3))

    def end_ids(self) -> set[int]:
        named = (self.token(name) for name in ("eos", "eot", "eom"))
        ends = {self.ids[token] for token in named if token is not None}
        for text in _END_TEXTS:
            index = self.ids.get(text)
            if index is not None and self.types[index] == _CONTROL:
                ends.add(index)
        return ends

    def byte_level(self) -> Tokenizer:
        merges: list[tuple[str, str]] = []
        for merge in self.strings("merges"):
            left, _, right = merge.partition(" ")
            if left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise self.fail(f"tokenizer.ggml.merges has {merge!r}, which is not a token")
            merges.append((left, right))
        core = Tokenizer(BPE(self.ids, merges, ignore_merges=self.pre == _LLAMA3))
        if self.pre == _QWEN2:
            core.normalizer = normalizers.NFC()
        core.pre_tokenizer = _cut(self.pre)
        core.decoder = decoders.ByteLevel()
        return core

    def sentencepiece(self) -> Tokenizer:
        core = Tokenizer(
            BPE(
                self.ids,
                list(self.merges_from_scores()),
                unk_token=self.token("unknown"),
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefix = [normalizers.Prepend("▁")] if self.space_prefix else []
        core.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.space_prefix:
            steps.append(decoders.Strip(" ", 1, 0))
        core.decoder = decoders.Sequence(steps)
        return core

    def merges_from_scores(self) -> Iterator[tuple[str, str]]:
        """Every pair of tokens that makes a token; the higher that one's score, the sooner."""
        scores = self.numbers("scores")
        normal = {token for token, kind in zip(self.tokens, self.types, strict=True) if kind == _NORMAL}
        for token in sorted(normal, key=lambda token: (-scores[self.ids[token]], self.ids[token])):
            pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            known = [pair for pair in pairs if pair[0] in normal and pair[1] in normal]
            yield from sorted(known, key=lambda pair: (self.ids[pair[0]], self.ids[pair[1]]))

    def detokenizer(self) -> Callable[[Any], Any]:
        if self.model == "gpt2":
            return ByteLevelDetokenizer
        return partial(SentencePieceDetokenizer, strip_space=self.space_prefix)


def _cut(pre: str) -> Any:
    if pre == _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == _SMOLLM:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    digits = "{1,3}" if pre == _LLAMA3 else ""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS % digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
