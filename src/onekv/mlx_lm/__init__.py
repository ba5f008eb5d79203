"""Drop-in classes for programs written on mlx-lm: the same names and behaviour, every token's KV once in memory.

    import onekv.mlx_lm
    onekv.mlx_lm.install()

After that mlx-lm's own `make_prompt_cache`, generators and server use them. Each class can also be used by itself.
TurboQuantKVCache, which mlx-lm does not have, is used where a program passes it on as `prompt_cache`.
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
