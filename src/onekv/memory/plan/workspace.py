"""What a model needs in addition to the KV: its weights, and the workspace of a step."""

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from ..attention.turns import UNIT
from ..device import kind
from ..formats.centre import centre_bytes
from ..layout import Layout
from ..pool.table import blocks_needed

# Attention scores of a prefill step stay below this: long contexts are read in smaller chunks.
SCORES = 256 * 2**20
# And so do logits of a prompt's tokens, where they are requested.
SCORED = 64 * 2**20


def weight_bytes(model: Module) -> int:
    return sum(array.nbytes for array in _weights(model))


def _weights(model: Module) -> list[mx.array]:
    flat: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # type: ignore[assignment]
    return [array for _, array in flat]


def workspace_bytes(
    model: Module,
    layout: Layout,
    blocks: tuple[int, ...],
    block_size: int,
    max_batch: int,
    chunk: int,
) -> int:
    """What a step needs in addition to weights and pool: activations, scores, logits, one gathered layer, centres."""
    shapes = [array.shape for array in _weights(model) if array.ndim >= 2]
    width = max((shape[-2] for shape in shapes if shape[-2] != layout.vocabulary), default=1)
    activations = chunk * width * 4 * 8
    logits = max_batch * layout.vocabulary * 4 * 4
    gathered = max(
        (
            max(layer.plain_bytes for layer in group.layers) * count * block_size
            for group, count in zip(layout.groups, blocks, strict=True)
        ),
        default=0,
    )
    return activations + logits + gathered + _centres(layout, blocks, block_size) + SCORES


def _centres(layout: Layout, blocks: tuple[int, ...], block_size: int) -> int:
    """Centres of keys, their table of all positions, and what is added to one gathered layer."""
    total = most = 0
    for group, count in zip(layout.groups, blocks, strict=True):
        layers = [layer for layer in group.layers if layer.wants_centre]
        total += sum(centre_bytes(layer.heads, layer.k_dim) for layer in layers)
        rows = [(layer.heads * 2 + 1) * layer.k_dim * 4 for layer in layers]
        most = max(most, max(rows, default=0) * (count * block_size + UNIT))
    return total + most


def chunk_tokens(layout: Layout, length: int, chunk: int) -> int:
    """How many tokens of a prompt to store in one step after `length` of them: fewer where scores are large.

    MLX's CPU attention makes the scores of a whole chunk, [query heads, chunk, length + chunk].
    """
    if kind() != "cpu":
        return chunk
    per_token = layout.query_heads * (length + chunk) * 4 * 2
    return max(1, min(chunk, SCORES // max(1, per_token)))


def fits_pass(
    layout: Layout, blocks: tuple[int, ...], block_size: int, chunk: int, lengths: list[int], counts: list[int]
) -> bool:
    """Whether the workspace of one chunk is enough for `counts` tokens of several prompts, each after `lengths`.

    In a pass all rows are as wide as the widest and read as many blocks as the longest. Attention with a mask for each
    row may make its scores on a GPU, too.
    """
    rows, width = len(counts), max(counts)
    end = -(-(max(lengths) + width) // block_size) * block_size
    scores = layout.query_heads * rows * width * end * 4 * 2
    gathered = [rows * blocks_needed(group.rule, block_size, end, width) for group in layout.groups]
    fits = all(needed <= count for needed, count in zip(gathered, blocks, strict=True))
    return rows * width <= chunk and scores <= SCORES and fits


def scored_tokens(layout: Layout) -> int:
    """How many tokens of a prompt to store in one step where their logits are computed, too."""
    return max(1, SCORED // (layout.vocabulary * 4))
