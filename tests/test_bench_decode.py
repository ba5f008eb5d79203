"""What `onekv bench decode` compares: a token per step on both sides."""

from onekv.bench.decode import _OneKV
from stock import small_llama


def test_nothing_is_guessed():
    """A random prompt makes a model repeat itself; speculation would then be measured, not decoding."""
    side = _OneKV(small_llama(1, num_hidden_layers=2, intermediate_size=64, num_key_value_heads=2), 2, 64, 16, 0)
    assert side.engine.speculation is None
    assert sum(1 for _ in side.start([[1, 2, 3] * 5, [4, 5] * 6], 40)) == 40
