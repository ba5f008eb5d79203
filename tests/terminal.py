"""Commands as a person has them: in terminals of their own (pexpect), and started with Ctrl-C ignored."""

import io
import sys

import pexpect

PATIENCE = 120
# Before a command: it is started with Ctrl-C ignored, as a script does for its background jobs.
UNINTERRUPTED = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])",
)


class Terminal(pexpect.spawn):
    """`seen` has all that was read."""

    def __init__(self, command: str, *arguments: str) -> None:
        self.seen = io.StringIO()
        super().__init__(command, list(arguments), timeout=PATIENCE, encoding="utf-8")
        self.logfile_read = self.seen

    def until(self, text: str) -> str:
        """Waits for `text`; gives what came before it."""
        self.expect_exact(text)
        return self.before

    def end(self) -> int:
        """Waits for it; gives the exit status."""
        self.expect(pexpect.EOF)
        return self.wait()
