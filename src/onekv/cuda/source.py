"""The source of CUDA kernels: bodies and helpers in .cu files of a package, and the text that precedes them.

MLX generates a kernel's signature from the names of its inputs and outputs; a file is a body, or a part of one. A line
`#include "name.cu"` is replaced by that file. Shapes and settings are constants (`define`): there is one kernel for
every combination.
"""

import re
from functools import cache
from importlib.resources import files

import mlx.core as mx

NAMES = {mx.bfloat16: "__nv_bfloat16", mx.float16: "__half"}
Constants = tuple[tuple[str, int | float | bool], ...]
_INCLUDE = re.compile(r'^#include "(\w+)\.cu"\n', re.MULTILINE)


def on_cuda() -> bool:
    return mx.default_device() == mx.gpu and mx.cuda.is_available()


@cache
def read(name: str, package: str = __package__) -> str:
    """The file of that name, a .cu file unless it says otherwise, with what it includes."""
    return "\n" + _INCLUDE.sub(lambda line: _text(line[1], package), _text(name, package))


def _text(name: str, package: str) -> str:
    return files(package).joinpath(name if "." in name else f"{name}.cu").read_text(encoding="utf-8")


def kernel_name(dtype: mx.Dtype, constants: Constants) -> str:
    return f"{NAMES[dtype]}_{name_of(constants)}"


def name_of(constants: Constants) -> str:
    values = "_".join(f"{value:.9g}" if isinstance(value, float) else str(int(value)) for _, value in constants)
    return values.replace(".", "p").replace("-", "m").replace("+", "")


def define(dtype: mx.Dtype, constants: Constants) -> str:
    kinds = {bool: "bool", int: "int64_t", float: "float"}
    lines = [f"constexpr {kinds[type(value)]} {name} = {str(value).lower()};" for name, value in constants]
    return "\n".join((f"using T = {NAMES[dtype]};", *lines, ""))
