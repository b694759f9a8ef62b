"""Times of fills in the engine, as samples for the rates of prefills.

Steps compute several chunks together when several are filled at once. Each alone then seems to take as long as all of
them, and prefills several times as long as they do. So fills that overlap are one sample: their tokens in the time from
the first one's begin to the last one's end. On the replica's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

from kvmanager.loading.load_rates import pairs


class FillTimes:
    """See the module's docstring. `report` takes tokens, seconds, and how many tokens stood before these."""

    def __init__(self, report: Callable[[int, float, int], None]) -> None:
        self._report = report
        self._under_way = 0
        self._began: float = inf
        self._ended: float = -inf
        self._forget()

    @contextmanager
    def fill(self) -> Iterator[None]:
        """Time one fill. A fill that breaks off leaves no sample: its own part of the time is not known."""
        self._under_way += 1
        try:
            yield
        except BaseException:
            self._whole = False
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._sum_up()

    def computed(self, tokens: int, began: float, ended: float, context: int) -> None:
        """A fill's `tokens` behind `context` others were computed; times are the engine's clock."""
        self._tokens += tokens
        self._pairs += pairs(tokens, context)
        self._began, self._ended = min(self._began, began), max(self._ended, ended)

    def _sum_up(self) -> None:
        if self._whole and self._tokens:
            context = max(0, round(self._pairs / self._tokens - self._tokens / 2))
            self._report(self._tokens, self._ended - self._began, context)
        self._forget()

    def _forget(self) -> None:
        self._tokens, self._pairs = 0, 0.0
        self._began, self._ended = inf, -inf
        self._whole = True
