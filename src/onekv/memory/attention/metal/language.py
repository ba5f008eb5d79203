"""Kernels written once for Metal and CUDA: a header of each language defines the names that the bodies use.

MLX declares a Metal kernel's thread attributes only if their names occur in the source proper, not in the header.
So the source starts with a few lines of the language's own that say which thread this is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from ....cuda.source import Constants, name_of, read
from ...device import Kind

# As `unpack` in rows.metal numbers them.
KINDS = {mx.float32: 0, mx.bfloat16: 1, mx.float16: 2}


@dataclass(frozen=True, eq=False)
class Language:
    # The function of `mx.fast` that makes a kernel.
    maker: str
    # The header.
    names: str
    types: Mapping[mx.Dtype, str]
    # Index of the thread in its block, lane, warp, and position of the block in the grid.
    place: str


METAL = Language(
    "metal_kernel",
    "lanes.metal",
    {mx.float32: "float", mx.bfloat16: "bfloat16_t", mx.float16: "float16_t"},
    """
  const int thread_index = int(thread_position_in_threadgroup.x), lane = int(thread_index_in_simdgroup);
  const int warp = int(simdgroup_index_in_threadgroup);
  const int block_x = int(threadgroup_position_in_grid.x), block_y = int(threadgroup_position_in_grid.y);
""",
)
CUDA = Language(
    "cuda_kernel",
    "lanes.cu",
    {mx.float32: "float", mx.bfloat16: "__nv_bfloat16", mx.float16: "__half"},
    """
  const int thread_index = threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int block_x = blockIdx.x, block_y = blockIdx.y;
""",
)
LANGUAGES: dict[Kind, Language] = {"metal": METAL, "cuda": CUDA}


@cache
def kernel(
    body: str,
    language: Language,
    dtype: mx.Dtype,
    constants: Constants,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
) -> Any:
    """The kernel whose body is in that file; there is one for every combination of constants."""
    return getattr(mx.fast, language.maker)(
        name=f"onekv_{body}_{KINDS[dtype]}_{name_of(constants)}",
        input_names=list(inputs),
        output_names=list(outputs),
        header=read(language.names, __package__)
        + _define(language, dtype, constants)
        + read("rows.metal", __package__),
        source=language.place + read(f"{body}.metal", __package__),
    )


def _define(language: Language, dtype: mx.Dtype, constants: Constants) -> str:
    lines = [f"using T = {language.types[dtype]};", f"CONSTANT int KIND = {KINDS[dtype]};"]
    for name, value in constants:
        if isinstance(value, bool):
            lines.append(f"CONSTANT bool {name} = {str(value).lower()};")
        else:
            lines.append(f"CONSTANT {'float' if isinstance(value, float) else 'int'} {name} = {_literal(value)};")
    return "\n".join((*lines, ""))


def _literal(value: float) -> str:
    # Metal has no double.
    return f"{value!r}f" if isinstance(value, float) else str(value)
