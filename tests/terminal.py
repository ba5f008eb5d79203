"""A command as a person has it."""

import os
import select
import subprocess
import sys

import pytest

PATIENCE = 120
# Before a command: it is started with Ctrl-C ignored, as a script does for its background jobs.
UNINTERRUPTED = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])",
)


class Terminal:
    """A command in a pseudo-terminal of its own, as a person has it."""

    def __init__(self, *argv: str) -> None:
        self.end, theirs = os.openpty()
        # The command must own the terminal, or Ctrl-C would not reach it.
        own = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", own, *argv], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""

    def type(self, keys: str) -> None:
        os.write(self.end, keys.encode())

    def read(self) -> bool:
        """More output, if there is any to come; False at its end."""
        if not select.select([self.end], [], [], PATIENCE)[0]:
            pytest.fail(f"nothing more came after: {self.seen!r}")
        try:
            self.seen += os.read(self.end, 4096).decode()
        except OSError:  # What Linux says when the other end is closed.
            return False
        return True

    def expect(self, text: str) -> str:
        """Waits for `text`; gives what came before it and goes on after it."""
        while text not in self.seen:
            assert self.read(), f"{text!r} did not come; instead: {self.seen!r}"
        before, _, self.seen = self.seen.partition(text)
        assert "Traceback" not in before
        return before

    def ask(self, question: str) -> str:
        self.type(question + "\n")
        self.expect(question + "\r\n")
        return self.expect("\r\n> ")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.end)
