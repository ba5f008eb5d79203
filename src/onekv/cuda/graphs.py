"""MLX's cache of CUDA graphs.

MLX keeps CUDA graphs by their structure. By default it counts those that were not in its cache, and once there have
been 800 of them in the life of a process, it raises an exception for every further one: a server would fail after some
days. A graph that is not in the cache only has to be made again.
"""

import os


def allow_misses() -> None:
    """Before MLX is loaded, which reads this once. A user's own value stays."""
    os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")
