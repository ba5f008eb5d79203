"""The source of the CUDA kernels: bodies and helpers in .cu files beside this one, and what is put before them.

    mma.cu       products of tensor cores and conversions, for both kernels
    codes.cu     codes of encoded rows: read, turned and stored
    place.cu     who a thread is, and what its thread block reads
    last.cu      what follows is done by the thread block that ends last of its row and head
    plain.cu,    the bodies of the kernels; MLX makes their signatures from the names of inputs and outputs
    encoded.cu

A line `#include "name.cu"` stands for that file. Shapes and settings come as constants (`define`): one kernel for every
combination.
"""

import re
from functools import cache
from importlib.resources import files

import mlx.core as mx

NAMES = {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half"}
Constants = tuple[tuple[str, int | float | bool], ...]
_INCLUDE = re.compile(r'^#include "(\w+)\.cu"\n', re.MULTILINE)


@cache
def read(name: str) -> str:
    """The file of that name, with what it includes."""
    return "\n" + _INCLUDE.sub(lambda line: _text(line[1]), _text(name))


def _text(name: str) -> str:
    return files(__package__).joinpath(f"{name}.cu").read_text(encoding="utf-8")


def kernel_name(dtype: mx.Dtype, constants: Constants) -> str:
    values = "_".join(f"{value:.9g}" if isinstance(value, float) else str(int(value)) for _, value in constants)
    return f"{NAMES[dtype]}_{values}".replace(".", "p").replace("-", "m").replace("+", "")


def define(dtype: mx.Dtype, constants: Constants) -> str:
    kinds = {bool: "bool", int: "int64_t", float: "float"}
    lines = [f"constexpr {kinds[type(value)]} {name} = {str(value).lower()};" for name, value in constants]
    return "\n".join((f"using T = {NAMES[dtype]};", *lines, ""))
