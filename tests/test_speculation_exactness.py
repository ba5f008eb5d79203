"""A slice of speculation_exactness.py: everything at once, for a few models."""

import pytest

from architectures import build
from speculation_exactness import PROPOSERS, play


@pytest.mark.parametrize("how", PROPOSERS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma4_text", "gpt_oss"])
def test_answers_are_those_without_speculation(name, how):
    found = play(build(name), how, 500, seed=1)
    assert found.compared >= 500 and found.different == 0
    assert found.proposed > 0 and found.requests > 10
