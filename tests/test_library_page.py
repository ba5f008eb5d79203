"""What docs/library.md shows runs, and its table has every option with its default."""

import re
from dataclasses import fields
from pathlib import Path

from onekv import Sampling
from onekv.ask import MAX_TOKENS

PAGE = (Path(__file__).parents[1] / "docs" / "library.md").read_text()


def test_the_examples_run_in_order(smollm2_path, capsys):
    namespace: dict[str, object] = {}
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(examples) == 8
    for number, example in enumerate(examples):
        exec(compile(example, f"example {number} of docs/library.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "Completion(' Paris" in printed
    assert "LLM(smollm2-135m, KV pool" in printed


def test_the_table_has_every_option_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \| .+ \|$", PAGE, re.MULTILINE))
    defaults = {f.name: f.default for f in fields(Sampling)} | {"max_tokens": MAX_TOKENS}
    shown = {None: "none", (): "none", False: "`False`"}
    assert rows == {
        name: f"{value:g}" if isinstance(value, int | float) and value is not False else shown[value]
        for name, value in defaults.items()
    }
