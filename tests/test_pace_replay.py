"""What speculation makes of texts that are known beforehand, where a step takes as long as its rows say: no clock.

The texts are parts of a book, in pieces of three letters, so that short sequences of them recur as a tokenizer's do.
"""

import statistics

import numpy as np
import pytest

from onekv.bench.texts import prose
from onekv.engine import Request
from onekv.engine.speculation.control import Speculation
from onekv.engine.speculation.lookup import Lookup

ANSWER = 96
# Steps of so many rows in those of one, as on two CPU cores with SmolLM2.
WIDTHS, SECONDS = (1, 2, 3, 4, 6, 8, 12, 16), (1.0, 1.2, 1.4, 1.45, 1.85, 2.1, 2.75, 3.3)


def texts(count: int, length: int) -> list[list[int]]:
    book = " ".join(prose().split())
    pieces = [book[at : at + 3] for at in range(0, 3 * 45_000, 3)]
    ids = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    numbers = [ids[piece] for piece in pieces]
    return [numbers[at : at + length] for at in range(0, count * length, length)]


class Replay:
    def __init__(self) -> None:
        self.speculation = Speculation(Lookup(), 15)
        self.widths: list[int] = []
        self._number = 0
        # Wide steps were measured, as after some hours of use.
        for rows in WIDTHS[1:] * 3:
            self.speculation._found.add(rows, self.seconds(rows))

    @staticmethod
    def seconds(rows: int) -> float:
        return float(np.interp(rows, WIDTHS, SECONDS))

    def ratio(self, prompt: list[int], answer: list[int]) -> float:
        """Steps of one token in the time that the answer takes; `widths` are those of its proposals."""
        self._number += 1
        request = Request(prompt, len(answer), salt=str(self._number))
        request.tokens.append(answer[0])
        took, self.widths = 0.0, []
        while (had := len(request.tokens)) < len(answer):
            proposals = self.speculation.propose([request])
            guess = proposals.tokens[0] if proposals is not None else []
            right = next((n for n, token in enumerate(guess) if token != answer[had + n]), len(guess))
            request.tokens += answer[had : had + 1 + right]
            took += self.seconds(1 + len(guess))
            if guess:
                self.widths.append(len(guess))
                self.speculation.verified([request], [guess], False, [right], self.seconds(1 + len(guess)))
            else:
                self.speculation.plain([request], self.seconds(1))
        self.speculation.ended(request, True)
        return (len(answer) - 1) / took


@pytest.mark.parametrize("others_copy", [False, True])
def test_text_that_does_not_repeat_is_hardly_slower_and_what_copies_much_faster(others_copy):
    replay, free, copies = Replay(), [], []
    for text in texts(150, 200 + ANSWER):
        free.append(replay.ratio(text[:200], text[200:]))
        if others_copy:
            copies.append(replay.ratio(text, text[20 : 20 + ANSWER]))
    assert statistics.median(free) >= 0.99 and min(free) >= 0.97
    assert sum(ratio < 0.98 for ratio in free) <= 1
    assert not copies or min(copies) >= 3.0


def test_a_new_request_has_few_tokens_verified_behind_a_short_match_whatever_others_copied():
    replay = Replay()
    for text in texts(40, 200 + ANSWER):
        replay.ratio(text, text[20 : 20 + ANSWER])
        assert max(replay.widths) > 8
    # Three tokens of the prompt come again, and then others.
    fresh = list(range(100_000, 100_300))
    replay.ratio(fresh[:200], [*fresh[200:220], *fresh[50:53], *fresh[220:293]])
    assert len(replay.widths) == 1 and replay.widths[0] <= 3
