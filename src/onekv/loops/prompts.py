"""Operations of prefill other than products, on the memory of evaluated arrays: MLX's exponentials take 7 to 25 ns
each.
"""

import mlx.core as mx
import numpy as np

from . import call

COMPILING = "onekv: compiling prompt attention for this processor; this is done once and takes some seconds"


def weigh(scores: mx.array, tokens: int, causal: bool) -> mx.array:
    """Makes `scores` [..., rows, keys], to the base 2, the weights of a softmax; gives their sums, [..., rows, 1].

    Nobody else may have the array. Row i is of token i % `tokens`; with `causal` the last of them reads all keys, the
    one before it one less, and so on.
    """
    from .prompt_kernel import weigh as loop

    mx.eval(scores)
    sums = np.empty(scores.shape[:-1], np.float32)
    call(loop, COMPILING, np.asarray(scores).reshape(-1, scores.shape[-1]), tokens, causal, sums.reshape(-1))
    return mx.array(sums)[..., None]


def gate(gates: mx.array, values: mx.array) -> mx.array:
    """`values` * silu(`gates`)."""
    from .prompt_kernel import gate as loop

    mx.eval(gates, values)
    out = np.empty(gates.shape, np.float32)
    flat = (np.ascontiguousarray(np.asarray(array)).reshape(-1) for array in (gates, values))
    call(loop, COMPILING, *flat, out.reshape(-1))
    return mx.array(out)
