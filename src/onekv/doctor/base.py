"""The contract of a check.

A check has a name, a sentence about what it shows, and a function that takes the `Case` and writes figures and findings
to `Notes`. Its status is that of its worst finding, or ok if there are none. A failure or warning names what avoids the
problem: a switch (`switch` makes sure that it exists) or a command.

A check may raise; it has then failed with the exception as its reason (`running.py`), and the others still run. It must
leave nothing behind, on disk or in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from ..config import Settings, flag, variable
from ..server.settings import ServerSettings
from ..tiers.files import CLOCK, FILES, Clock, Files


class Status(StrEnum):
    """From least to most severe."""

    SKIPPED = "skipped"
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


SEVERITY = list(Status)


@dataclass(frozen=True)
class Figure:
    """A measurement in `unit` (B, B/s, tokens/s, s, ...); `limit` is its upper bound, if it has one."""

    name: str
    value: float | int | str
    unit: str = ""
    limit: float | None = None


@dataclass(frozen=True)
class Finding:
    status: Status
    text: str
    # The switch or command that avoids it.
    remedy: str | None = None


@dataclass
class Notes:
    """What a check has measured and found so far."""

    figures: list[Figure] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def figure(self, name: str, value: float | int | str, unit: str = "", limit: float | None = None) -> None:
        self.figures.append(Figure(name, value, unit, limit))

    def ok(self, text: str) -> None:
        self.findings.append(Finding(Status.OK, text))

    def warn(self, text: str, remedy: str | None = None) -> None:
        self.findings.append(Finding(Status.WARNING, text, remedy))

    def fail(self, text: str, remedy: str | None) -> None:
        self.findings.append(Finding(Status.FAILED, text, remedy))

    def skip(self, reason: str) -> None:
        """The check, or a part of it, was not run."""
        self.findings.append(Finding(Status.SKIPPED, reason))

    @property
    def status(self) -> Status:
        return max((finding.status for finding in self.findings), key=SEVERITY.index, default=Status.OK)


@dataclass(frozen=True)
class Case:
    """What is examined: this machine with these settings, and a model if one is named."""

    settings: Settings = field(default_factory=Settings)
    model: str | None = None
    # Port that `onekv serve` would listen on.
    port: int = 8000
    # Operating system calls of the disk cache; tests plant faults here.
    files: Files = FILES
    clock: Clock = CLOCK
    # Progress: the start and end of each check, and what it is doing in between.
    say: Callable[[str], None] = lambda text: None
    doing: Callable[[str], None] = lambda text: None
    # Wall clock and monotonic clock at the start of the run.
    begun: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "begun", (self.clock.now(), self.clock.monotonic()))


@dataclass(frozen=True)
class Check:
    name: str
    shows: str
    run: Callable[[Case, Notes], None]
    # What the verdict says if it passed or failed; nothing if empty.
    passed: str = ""
    failed: str = ""


@dataclass(frozen=True)
class Result:
    check: Check
    status: Status
    seconds: float
    figures: tuple[Figure, ...]
    findings: tuple[Finding, ...]


def switch(name: str, value: str) -> str:
    """A setting as flag and variable, with a value or an upper-case placeholder such as DIR.

    Raises LookupError if there is no such setting, SettingError if it does not accept the value.
    """
    for each in (*Settings.defined(), *ServerSettings.defined()):
        if each.name == name:
            if not value.isupper():
                each.convert(value, flag(name))
            return f"{flag(name)} {value} ({variable(name)}={value})"
    raise LookupError(f"there is no setting {name!r}")
