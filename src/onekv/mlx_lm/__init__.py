"""Drop-in classes for programs written for mlx-lm: the same names and behaviour, every token's KV once in memory.

    import onekv.mlx_lm
    onekv.mlx_lm.install()

After that mlx-lm's own `make_prompt_cache`, generators and server use them; `REPLACES` and `replaced()` say which names
of mlx-lm are OneKV's. Each class can also be used by itself. TurboQuantKVCache, which mlx-lm does not have, is used
where a program passes it on as `prompt_cache`.

Code is shared with `onekv.memory` where the idea is the same: how a model's attention reaches a cache (`hook`), softmax
and causal masks (`attention.softmax`, `attention.chunk`), encoded KV and attention over it (`formats`,
`attention.tiles`), and how much memory there is (`plan.device`). The rest is separate, because programs that use mlx-lm
create, copy, trim, merge and drop caches at will, without announcing it. Slabs are allocated on demand and freed with
their last reference, whereas a pool is allocated once and its blocks are reserved. An extent is a run of columns in the
shape that mlx-lm's models and files expect, whereas a block may be anywhere. A ring keeps mlx-lm's order of columns,
because masks and files depend on it, whereas a table drops blocks. And a prompt cache hands out whole caches, whereas
the prefix tree hands out blocks.
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
