"""The version of mlx-lm that these classes are written for."""

from importlib.metadata import version

from ..errors import OneKVError

SUPPORTED = "0.32."


class UnsupportedMlxLm(OneKVError, ImportError):
    """Another mlx-lm is installed: its caches have other methods and states."""


def check_version(installed: str | None = None) -> None:
    installed = installed or version("mlx-lm")
    if not installed.startswith(SUPPORTED):
        raise UnsupportedMlxLm(
            f"onekv.mlx_lm is written for mlx-lm {SUPPORTED}x, but {installed} is installed; "
            "install it with: pip install 'mlx-lm>=0.32.2,<0.33'"
        )
