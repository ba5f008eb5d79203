"""Fixtures for tests of kernels."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from onekv.memory.attention.metal import language
from onekv.memory.device import Kind

from . import on_cpu


@pytest.fixture(scope="session")
def kernels_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> on_cpu.OnCpu:
    """Runs GPU kernels on the CPU; all processes of a test run share the compiled ones."""
    if (reason := "kernels run on the GPU here" if mx.default_device() == mx.gpu else on_cpu.why_not()) is not None:
        pytest.skip(reason)
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "compiled_kernels"
    folder.mkdir(exist_ok=True)
    return on_cpu.OnCpu(folder)


@pytest.fixture
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA kernels run on the device, or on the CPU if there is none."""
    if not mx.cuda.is_available():
        monkeypatch.setattr(mx.fast, "cuda_kernel", request.getfixturevalue("kernels_on_cpu").cuda_kernel)


@pytest.fixture(
    params=["cuda"] if mx.cuda.is_available() else ["metal"] if mx.metal.is_available() else ["metal", "cuda"]
)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    """Kernels written for both Metal and CUDA run on the GPU there is, or, as either, on the CPU."""
    if mx.default_device() == mx.cpu:
        name = f"{request.param}_kernel"
        monkeypatch.setattr(mx.fast, name, getattr(request.getfixturevalue("kernels_on_cpu"), name))
        language.kernel.cache_clear()
    return request.param


def few_on_cpu(cases: Sequence[Any], step: int, is_small: Callable[[Any], bool]) -> Sequence[Any]:
    """All cases on a GPU; on the CPU, every `step`-th of the small ones, or all if ONEKV_ALL_KERNELS=on."""
    if mx.default_device() == mx.gpu or os.environ.get("ONEKV_ALL_KERNELS") == "on":
        return cases
    return [case for case in cases if is_small(case)][::step]
