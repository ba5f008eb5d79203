"""Drop-in classes for programs written on mlx-lm: the same names and behaviour, every token's KV once in memory.

    import onekv.mlx_lm
    onekv.mlx_lm.install()

After that mlx-lm's own `make_prompt_cache`, generators and server use them; `REPLACES` and `replaced()` say which names
of mlx-lm are OneKV's. Each class can also be used by itself. TurboQuantKVCache, which mlx-lm does not have, is used
where a program passes it on as `prompt_cache`.

What is the same idea as in `onekv.memory` is the same code: how a model's attention reaches a cache (`hook`), softmax
and causal masks (`attention.softmax`, `attention.chunk`), encoded KV and attention over it (`formats`,
`attention.tiles`), and how much memory there is (`plan.device`). The rest stays apart, because mlx-lm's programs make,
copy, trim, merge and drop caches as they like, and say nothing about it beforehand: slabs are allocated as they are needed and freed with their last
reference, where a pool is allocated once and blocks are reserved; an extent is a run of columns in the shape that
mlx-lm's models and files expect, where a block lies anywhere; a ring keeps mlx-lm's order of columns, because masks and
files depend on it, where a table forgets blocks; and a prompt cache hands out whole caches, where the prefix tree hands
out blocks.
"""

from .version import check_version

check_version()

from .kv import KVCache  # noqa: E402
from .kv_batch import BatchKVCache  # noqa: E402
from .patch import REPLACES, install, installed, is_installed, replaced, uninstall  # noqa: E402
from .prompt_cache import LRUPromptCache  # noqa: E402
from .rotating import RotatingKVCache  # noqa: E402
from .rotating_batch import BatchRotatingKVCache  # noqa: E402
from .slabs import PoolFullError  # noqa: E402
from .turbo import TurboQuantKVCache, to_turbo  # noqa: E402
from .version import UnsupportedMlxLm  # noqa: E402

__all__ = [
    "REPLACES",
    "BatchKVCache",
    "BatchRotatingKVCache",
    "KVCache",
    "LRUPromptCache",
    "PoolFullError",
    "RotatingKVCache",
    "TurboQuantKVCache",
    "UnsupportedMlxLm",
    "install",
    "installed",
    "is_installed",
    "replaced",
    "to_turbo",
    "uninstall",
]
