"""The process's open-file limit, which importing mlx_lm would lower for good."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from .build import require_mlx

_WANTED = 2048


@contextmanager
def open_file_limit_kept() -> Iterator[None]:
    """Inside, `resource.setrlimit` does nothing; on the way out a soft limit below 2,048 is raised.

    mlx_lm sets RLIMIT_NOFILE to (2048, 4096) when it is imported. A lowered hard limit cannot be
    raised again without root, so the call is kept from happening instead of being undone.
    """
    original = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = original
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def import_mlx_lm() -> None:
    """Imports mlx_lm with the open-file limit kept; to be called before anything else imports it."""
    require_mlx()
    with open_file_limit_kept():
        import mlx_lm.utils  # noqa: F401
