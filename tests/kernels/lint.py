"""Has clang parse Metal kernels. It knows C++ and address spaces, not the rest of Metal's language: it finds unknown
names, wrong types, pointers into the wrong address space, and writes to const. Nothing is run.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from .on_cpu import HERE, metal_source

# Not every kernel uses all of the common header.
FLAGS = ["-std=c++14", "-Wall", "-Wextra", "-Wno-unknown-attributes", "-Wno-unused", "-I", str(HERE)]
# Metal 3 has no lambdas, and its pointers must name their address space.
LAMBDA = re.compile(r"\[[&=]?\]\s*\(")
POINTER = re.compile(r"\b(\w+) (?:T|int|float|float4|uint4|uint32_t|int32_t|bfloat16_t|float16_t)\*")
SPACES = {"device", "constant", "thread", "threadgroup", "DEVICE", "PRIVATE", "SHARED_AT"}


def tidy() -> str | None:
    """The program: of the virtual environment, or of the system."""
    beside = Path(sys.executable).parent / "clang-tidy"
    return str(beside) if beside.exists() else shutil.which("clang-tidy")


class Texts:
    """Stands in for `mx.fast.metal_kernel`: collects what MLX would compile. Outputs are zeros."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def metal_kernel(self, **parts: Any) -> Callable[..., list[mx.array]]:
        def launch(*, inputs: Sequence[mx.array], **how: Any) -> list[mx.array]:
            name, text = metal_source(parts, inputs, how)
            self.texts[name] = text
            return [mx.zeros(*what) for what in zip(how["output_shapes"], how["output_dtypes"], strict=True)]

        return launch


def complaints(text: str, folder: Path) -> list[str]:
    """What is wrong with a kernel's text, line by line."""
    found = [f"a lambda: {match[0]}" for match in LAMBDA.finditer(text)]
    found += [f"no address space: {match[0]}" for match in POINTER.finditer(text) if match[1] not in SPACES]
    # Only a static variable of a function may be in an address space here.
    text = text.replace("#define SHARED threadgroup\n", "#define SHARED static threadgroup\n")
    source = folder / "kernel.cpp"
    source.write_text(f'#include "lint.h"\n{text}')
    command = [str(tidy()), "--checks=-*,clang-diagnostic-*", "--allow-no-checks", str(source), "--", *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True)
    return found + [line for line in done.stdout.splitlines() if re.search(r"(error|warning): ", line)]
