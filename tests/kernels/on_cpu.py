"""Runs GPU kernels on the CPU: compiles what MLX would compile as C++, with threads.cpp in place of a GPU.

`OnCpu.cuda_kernel` and `OnCpu.metal_kernel` stand in for those of `mx.fast`. A kernel runs when it is called, not when
its outputs are evaluated. Outputs and shared memory hold NaN until they are written; blocks, and threads between
synchronization points, run in random order. A KernelError reports deadlocks, lanes that diverge at a barrier or
shuffle, out-of-bounds and misaligned accesses, and too much shared memory.
"""

import ctypes
import hashlib
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from onekv.cuda.source import read

HERE = Path(__file__).parent
SHARED = 'static __attribute__((section("block_memory")))'
# The original, whatever tests replace it with.
_metal_kernel = mx.fast.metal_kernel
FLAGS = ["-std=c++17", "-w", "-march=native", "-shared", "-fPIC", "-I", str(HERE)]
# threads.cpp has the sanitizers' handlers, so their library is not linked.
CHECKED = ["-O1", "-fsanitize=alignment,bounds", "-nodefaultlibs", "-lm", "-lgcc", "-lc"]
# Bytes of shared memory per block.
MOST_SHARED = {"cuda": 48 << 10, "metal": 32 << 10}
CUDA_TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
}
# Parameters of a Metal kernel: buffers, and the thread attributes that its source uses.
PARAMETER = re.compile(r"^  (.*[ *&])(\w+) \[\[(?:buffer\((\d+)\)|(\w+))\]\]", re.MULTILINE)
ASKED = {
    "thread_position_in_threadgroup": "kernel_thread",
    "threadgroup_position_in_grid": "kernel_block",
    "thread_index_in_simdgroup": "kernel_thread.x % 32",
    "simdgroup_index_in_threadgroup": "kernel_thread.x / 32",
}
CUDA = """#include "cuda.h"
{header}
static void body({signature}) {{
{source}
}}
"""
ENTRY = """
extern "C" void kernel(void** arguments) {{ body({arguments}); }}
extern char __start_block_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_block_memory[] __attribute__((weak, visibility("hidden")));
extern "C" char* kernel_shared(uint64_t* bytes) {{
  *bytes = __stop_block_memory - __start_block_memory;
  return __start_block_memory;
}}
"""


class KernelError(Exception):
    """A kernel did what is undefined or impossible on a GPU."""


@dataclass(frozen=True)
class Launch:
    """The grid of a kernel, and its outputs."""

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: Sequence[tuple[int, ...]]
    output_dtypes: Sequence[mx.Dtype]


def why_not() -> str | None:
    """Why kernels cannot be run here; None if they can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return "kernels are run on the CPU on Linux alone"
    return None if _compiler() else "no C++ compiler to run kernels on the CPU"


def _compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def metal_source(parts: dict[str, Any], inputs: Sequence[mx.array], how: dict[str, Any]) -> tuple[str, str]:
    """A Metal kernel's name and the text that MLX generates for these inputs, without MLX's own header.

    A build without Metal cannot run a Metal kernel, but it can export a function that calls one.
    """
    made = _metal_kernel(**parts)
    seen: list[dict[str, Any]] = []
    mx.export_function(seen.append, lambda *arrays: made(inputs=list(arrays), stream=mx.gpu, **how), *inputs)
    (arguments,) = [entry["arguments"] for entry in seen if entry.get("name") == "CustomKernel"]
    return arguments[0], arguments[1]


class OnCpu:
    """Compiles each text once, into `folder`, which processes may share."""

    def __init__(self, folder: Path, flags: tuple[str, ...] = ()) -> None:
        """`flags` are for threads.cpp."""
        self._folder, self._flags = folder, flags
        self._planted: tuple[str, str] | None = None
        self._found = False
        self._seeds = itertools.count(1)

    @contextmanager
    def planted(self, old: str, new: str) -> Iterator[None]:
        """Inside, `old` is replaced by `new` in the text of kernels."""
        self._planted, self._found = (old, new), False
        try:
            yield
        finally:
            self._planted = None
        assert self._found, f"no kernel has {old!r}"

    def cuda_kernel(
        self, *, name: str, input_names: list[str], output_names: list[str], source: str, header: str = ""
    ) -> Callable[..., list[mx.array]]:
        """Like `mx.fast.cuda_kernel`."""

        def launch(*, inputs: Sequence[mx.array], **how: Any) -> list[mx.array]:
            # As in MLX, an input is followed by its shape if the source uses it.
            signature, given = [], []
            for argument, array in zip(input_names, inputs, strict=True):
                signature.append((f"const {CUDA_TYPES[array.dtype]}*", argument))
                given.append(array)
                if f"{argument}_shape" in source:
                    signature.append(("const int32_t*", f"{argument}_shape"))
                    given.append(mx.array(array.shape, mx.int32))
            outputs = zip(how["output_dtypes"], output_names, strict=True)
            signature += [(f"{CUDA_TYPES[dtype]}*", argument) for dtype, argument in outputs]
            text = CUDA.format(
                # cuda.h replaces mma.cu, which is written in PTX.
                header=header.replace(read("mma"), "\n"),
                signature=", ".join(map(" ".join, signature)),
                source=source,
            )
            arguments = [f"({kind})arguments[{number}]" for number, (kind, _) in enumerate(signature)]
            return self._run(text + ENTRY.format(arguments=", ".join(arguments)), "cuda", given, Launch(**how))

        return launch

    def metal_kernel(self, **parts: Any) -> Callable[..., list[mx.array]]:
        """Like `mx.fast.metal_kernel`."""

        def launch(*, inputs: Sequence[mx.array], **how: Any) -> list[mx.array]:
            name, text = metal_source(parts, inputs, how)
            # Declarations of shared memory use this macro.
            text = text.replace("#define SHARED threadgroup\n", f"#define SHARED {SHARED}\n")
            arguments = [
                ASKED[asked] if asked else f"({kind.strip()})arguments[{number}]"
                for kind, _, number, asked in PARAMETER.findall(text)
            ]
            entry = ENTRY.replace("body(", f"{name}(").format(arguments=", ".join(arguments))
            return self._run(f'#include "metal.h"\n{text}{entry}', "metal", list(inputs), Launch(**how))

        return launch

    def _run(self, text: str, language: str, given: list[mx.array], launch: Launch) -> list[mx.array]:
        size = launch.threadgroup[0]
        assert launch.threadgroup[1:] == (1, 1) and size % 32 == 0 and launch.grid[0] % size == 0
        if self._planted is not None:
            self._found |= self._planted[0] in text
            text = text.replace(*self._planted)
        kernel = ctypes.CDLL(str(self._compiled(text, [str(self._threads), *CHECKED])))
        # MLX copies inputs that are not contiguous, too.
        inputs = [mx.contiguous(array) for array in given]
        mx.eval(inputs)
        shapes = list(zip(launch.output_shapes, launch.output_dtypes, strict=True))
        outputs = [np.full(int(np.prod(shape)) * dtype.size, 255, np.uint8) for shape, dtype in shapes]
        arrays: list[Any] = [*inputs, *outputs]
        pointers = (ctypes.c_void_p * len(arrays))(*map(_address, arrays))
        lengths = (ctypes.c_uint64 * len(arrays))(*(array.nbytes for array in arrays))
        blocks = (ctypes.c_uint * 3)(launch.grid[0] // size, *launch.grid[1:])
        shared_bytes = ctypes.c_uint64()
        kernel.kernel_shared.restype, kernel.kernel_run.restype = ctypes.c_void_p, ctypes.c_char_p
        shared = kernel.kernel_shared(ctypes.byref(shared_bytes))
        if shared_bytes.value > MOST_SHARED[language]:
            raise KernelError(f"a block shares {shared_bytes.value} bytes, which is too much for {language}")
        place = (pointers, lengths, len(arrays), blocks, size, ctypes.c_void_p(shared), shared_bytes)
        error = kernel.kernel_run(kernel.kernel, *place, ctypes.c_uint64(next(self._seeds)))
        if error is not None:
            raise KernelError(error.decode())
        return [
            mx.array(array).view(dtype).reshape(shape) for array, (shape, dtype) in zip(outputs, shapes, strict=True)
        ]

    @cached_property
    def _threads(self) -> Path:
        return self._compiled((HERE / "threads.cpp").read_text(), ["-O2", *self._flags])

    def _compiled(self, text: str, flags: list[str]) -> Path:
        headers = "".join(path.read_text() for path in sorted(HERE.glob("*.h")))
        name = hashlib.sha256("\n".join((text, headers, *flags)).encode()).hexdigest()[:20]
        library = self._folder / f"{name}.so"
        if not library.exists():
            source, made = (self._folder / f"{name}.{os.getpid()}.{suffix}" for suffix in ("cpp", "so"))
            source.write_text(text)
            command = [str(_compiler()), *FLAGS, "-o", str(made), str(source), *flags]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr[:4000])
            made.rename(library)
        return library


def _address(array: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memoryview(array)))
