"""Attention over several slabs, in tiles of a few tokens, against MLX's own over the same columns in one array."""

import mlx.core as mx
import numpy as np
import pytest

from onekv.mlx_lm import attention
from onekv.mlx_lm.attention import attend

LENGTHS = (37, 5, 22)
LENGTH, DIM, SCALE = sum(LENGTHS), 16, 0.3


def views(rows: int, heads: int, dtype: mx.Dtype) -> list[tuple[mx.array, mx.array]]:
    def array(columns: int, dim: int) -> mx.array:
        return mx.random.normal((rows, heads, columns, dim)).astype(dtype)

    return [(array(length, DIM), array(length, DIM + 8)) for length in LENGTHS]


def mask_of(kind: str, rows: int, query_heads: int, tokens: int) -> mx.array | str | None:
    causal = mx.arange(LENGTH - tokens, LENGTH)[:, None] >= mx.arange(LENGTH)
    if kind == "none":
        return None
    if kind == "causal":
        return "causal"
    if kind == "window":
        return causal & (mx.arange(LENGTH - tokens, LENGTH)[:, None] < mx.arange(LENGTH) + 9)
    if kind == "one row for all":
        return mx.arange(LENGTH)[None] > 12
    if kind == "of each sequence":
        # The first tokens of the first row are padding: they see nothing.
        starts = mx.array([LENGTH - tokens + 3, *[2] * (rows - 1)])
        return causal[None, None] & (mx.arange(LENGTH) >= starts[:, None, None, None])
    assert kind == "added, of each head"
    return mx.random.normal((rows, query_heads, tokens, LENGTH))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 13])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "kind", ["none", "causal", "window", "one row for all", "of each sequence", "added, of each head"]
)
def test_tiles_over_slabs_are_attention_over_one_array(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: mx.Dtype, tokens: int, sinks: bool, kind: str
) -> None:
    """With the softmax of either device, on the one that there is."""
    rows, heads, query_heads = 2, 2, 6
    monkeypatch.setattr(attention, "kind", lambda: device)
    # Tiles of 4 tokens.
    monkeypatch.setattr(attention, "TILE_BYTES", 4 * 4 * rows * query_heads * LENGTH)
    mx.random.seed(tokens)
    stored = views(rows, heads, dtype)
    queries = mx.random.normal((rows, query_heads, tokens, DIM)).astype(dtype)
    mask = mask_of(kind, rows, query_heads, tokens)
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        mask = mask.astype(dtype)
    column = mx.random.normal((query_heads,)).astype(dtype) if sinks else None
    out = attend(queries, stored, SCALE, mask, column)
    joined = [mx.concatenate(parts, axis=2).astype(mx.float32) for parts in zip(*stored, strict=True)]
    plain = [array.astype(mx.float32) if isinstance(array, mx.array) else array for array in (queries, column)]
    shown = mask.astype(mx.float32) if isinstance(mask, mx.array) and mask.dtype != mx.bool_ else mask
    expected = mx.fast.scaled_dot_product_attention(plain[0], *joined, scale=SCALE, mask=shown, sinks=plain[1])
    assert out.dtype == dtype and out.shape == expected.shape
    error = np.abs(np.array(out.astype(mx.float32)) - np.array(expected)).max()
    assert error < (2e-6 if dtype == mx.float32 else 0.03)
