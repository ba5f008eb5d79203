"""A server whose model thinks and calls tools as it is told to: no small one does that on demand.

The engine, its memory and all that comes after a token is chosen are real. What is said comes in tokens that the
tokenizer would not choose for it. The template is like Qwen3's: it keeps the thinking of a turn until the user asks
again.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from conftest import Server, start_server
from onekv.bench.soak import save_tiny

TEMPLATE = """\
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last -%}
<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif -%}
{{ m.content }}
{%- if loop.first and tools -%}{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}{%- endif -%}
{%- for call in m.tool_calls or [] -%}{%- set tool_call = call.function -%}
{{ '\\n' }}<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking -%}<think>\n{% endif -%}{%- endif -%}
"""
# As little to compute as there can be: prompts have up to 13,000 tokens.
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 32768,
}
# `onekv` with such a model. The first argument is its folder, the second a file with what it thinks and says by turn.
SAYS = """
import json, sys
from dataclasses import replace
from pathlib import Path
import onekv
import mlx.core as mx
from transformers import AutoTokenizer
from onekv.server.sampling_defaults import SamplingDefaults
tokenizer, turns = AutoTokenizer.from_pretrained(sys.argv.pop(1)), json.loads(Path(sys.argv.pop(1)).read_text())
def encode(text):
    return tokenizer.encode(text, add_special_tokens=False)
def cut(text):
    return [text[at : at + 5] for at in range(0, len(text), 5)]
start, end = encode("<|im_start|>") + encode("<|im_end|>")
header = [start, *encode("assistant\\n")]
def script(thought, said):
    pieces = ["<think>\\n", *cut(thought), "</think>", "\\n\\n", *cut(said)]
    return [token for piece in pieces for token in encode(piece)]
scripts = [script(*turn) for turn in turns]
def say(tokens, logits):
    tokens = tokens.tolist()
    turns = [at for at, token in enumerate(tokens) if token == start and tokens[at : at + len(header)] == header]
    said, wanted = tokens[turns[-1] + len(header) :], scripts[len(turns) - 1]
    chosen = wanted[len(said)] if len(said) < len(wanted) else end
    return mx.where(mx.arange(logits.shape[-1]) == chosen, 0.0, -1e9)[None]
sampling = SamplingDefaults.sampling
SamplingDefaults.sampling = lambda *given, **named: replace(sampling(*given, **named), logits_processors=(say,))
from onekv.cli import main
sys.exit(main())
"""


def start_thinker(
    folder: Path, script: Sequence[tuple[str, str]], *flags: str, chat_template: str = TEMPLATE
) -> Server:
    """`script` has what is thought and said in each turn of a conversation."""
    save_tiny(folder, **SMALL)
    tokenizer = folder / "tokenizer.json"
    text = tokenizer.read_text()
    # Two of its tokens by other names: the model has no more.
    for name, other in (("<repo_name>", "<think>"), ("<reponame>", "</think>")):
        assert json.dumps(name) in text
        text = text.replace(json.dumps(name), json.dumps(other))
    tokenizer.write_text(text)
    template, said = folder / "template.jinja", folder / "script.json"
    template.write_text(chat_template)
    said.write_text(json.dumps(script))
    given = ("--kv-memory", "64MiB", "--chat-template", str(template), *flags)
    return start_server(str(folder), *given, program=("-c", SAYS, str(folder), str(said)))
