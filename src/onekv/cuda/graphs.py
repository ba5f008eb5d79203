"""Limits of MLX's CUDA graphs. MLX reads them once, so they are set before it is loaded; a user's own values stay.

MLX keeps CUDA graphs by their structure. By default it counts those that were not in its cache, and once there have
been 800 of them in the life of a process, it raises an exception for every further one: a server would fail after some
days. A graph that is not in the cache only has to be made again.
"""

import os

LIMITS = {"MLX_ENABLE_CACHE_THRASHING_CHECK": "0"}


def set_limits() -> None:
    for name, value in LIMITS.items():
        os.environ.setdefault(name, value)
