"""Products as they are compiled for processors with narrower registers: with other tiles, and nothing to look up in,
they have the same bits.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from onekv import loops
from onekv.loops import product_kernel, products
from test_products import kinds, numbers

pytestmark = pytest.mark.skipif(
    loops.why_not() is not None or platform.machine() != "x86_64", reason="no compiled loops, or another processor"
)

NARROW = """
import sys
from llvmlite import binding

features = binding.get_host_cpu_features
binding.get_host_cpu_features = lambda: {name: on and "avx512" not in name for name, on in features().items()}

import numpy as np
from test_narrow_registers import results
from onekv.loops import product_kernel

assert not product_kernel.WIDE
np.savez(sys.argv[1], *results())
"""


def results() -> list[np.ndarray]:
    x = numbers(13, 608)
    return [made(x[:rows]) for made in map(products.product, kinds(53, 608)) for rows in (1, 2, 3, 5, 13)]


def test_products_have_the_same_bits(tmp_path: Path) -> None:
    # A processor with fused products, like the one here.
    environment = os.environ | {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    subprocess.run([sys.executable, "-c", NARROW, str(tmp_path / "narrow.npz")], env=environment, check=True)
    narrow = np.load(tmp_path / "narrow.npz")
    here = results()
    assert len(narrow.files) == len(here) == 25
    if not product_kernel.WIDE:
        pytest.skip("registers are as narrow here")
    for name, expected in zip(narrow.files, here, strict=True):
        assert np.array_equal(narrow[name], expected)
