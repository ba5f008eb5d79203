"""The state of a model's files when it was read: as long as it is unchanged, they contain the same model."""

from pathlib import Path


def seen(path: Path) -> str | None:
    """Of a file, or of all files in a folder: what changes when one of them is written, replaced, added or removed.

    None if there are none, or one cannot be looked at.
    """
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(file.name, file.stat()) for file in files if file.is_file()]
    except OSError:
        return None
    found = [(name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats]
    return f"{path.absolute()} {found}" if found else None


def unchanged(path: Path, before: str | None) -> str | None:
    """`before`, if the files still look as they did then; None if what was read meanwhile may be of both."""
    return before if before is not None and seen(path) == before else None
