"""How far a prefix is held, to the block: the one search that the manager and its mirrors share.

A *run* is what an index knows of a segment here: the marks of its blocks (`kvmanager.segments.spans`). Hashes are
chained, so two runs that begin with the same block are about the same beginning, and what they have in common with a
prompt is their leading blocks. Runs are kept by their first block. Several may begin there, *twins*: locations cut
apart, and what was evicted is still remembered.

The search goes from block to block: of the runs that begin where it has come to, the one that reaches furthest; where
none does, one that begins before and covers that block. No run crosses a multiple of ``blocks_per_segment``, so only
the blocks since the last one are tried. The result is exact: as many leading blocks as lie in any held run. O(runs of
the prompt), plus O(blocks_per_segment) where a run that begins before is needed, and at the end. One thread.
"""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kvmanager.segments.spans import MARK_BYTES


class Run:
    """Consecutive blocks of a sequence; in one index at a time, which links it into its lists."""

    __slots__ = ("marks", "next_twin")

    def __init__(self, marks: bytes) -> None:
        self.marks = marks
        self.next_twin: Run | None = None


R = TypeVar("R", bound=Run)
H = TypeVar("H")


class RunIndex(Generic[R]):
    """Runs by their first block."""

    __slots__ = ("_first",)

    def __init__(self) -> None:
        self._first: dict[bytes, R] = {}

    def __len__(self) -> int:
        """Return how many runs there are, twins counted as one."""
        return len(self._first)

    def add(self, run: R) -> None:
        """Add a run, which is in no index."""
        mark = run.marks[:MARK_BYTES]
        run.next_twin = self._first.get(mark)
        self._first[mark] = run

    def remove(self, run: R) -> None:
        """Take a run out, which is in this index. O(twins)."""
        mark = run.marks[:MARK_BYTES]
        before = self._first[mark]
        if before is run:
            if run.next_twin is None:
                del self._first[mark]
            else:
                self._first[mark] = run.next_twin  # type: ignore[assignment]
        else:
            while before.next_twin is not run:
                before = before.next_twin  # type: ignore[assignment]
            before.next_twin = run.next_twin
        run.next_twin = None

    def twins(self, mark: bytes) -> Iterator[R]:
        """Yield the runs that begin with a block."""
        run = self._first.get(mark)
        while run is not None:
            yield run
            run = run.next_twin  # type: ignore[assignment]

    def path(
        self,
        marks: bytes,
        blocks_per_segment: int,
        holds: Callable[[R], H | None],
        begin: int = 0,
        rank: Callable[[H], int] | None = None,
    ) -> tuple[list[R], list[int], list[H]]:
        """Return held runs that cover a prompt's leading blocks, where each one's part of it ends, and their holds.

        ``marks`` are those of the prompt's blocks. ``holds`` returns what makes a run count; None: it does not. Of runs
        that reach as far that of the highest ``rank`` is taken. The search starts at block ``begin``. Runs may overlap:
        each adds the blocks from the end of the one before it to its own.
        """
        first = self._first
        runs: list[R] = []
        ends: list[int] = []
        held: list[H] = []
        at, size = begin * MARK_BYTES, len(marks)
        while at < size:
            best, furthest, why = None, at, None
            run = first.get(marks[at : at + MARK_BYTES])
            while run is not None:
                hold = holds(run)
                if hold is not None:
                    run_marks = run.marks
                    end = at + len(run_marks)
                    if not marks.startswith(run_marks, at):
                        end = at + _shared(marks, at, run_marks)
                    if end > furthest or (end == furthest and rank is not None and rank(hold) > rank(why)):  # type: ignore[arg-type]
                        best, furthest, why = run, end, hold
                run = run.next_twin  # type: ignore[assignment]
            if best is None:
                best, furthest, why = self._covering(marks, at, blocks_per_segment, holds)
                if best is None:
                    break
            runs.append(best)
            ends.append(furthest // MARK_BYTES)
            held.append(why)  # type: ignore[arg-type]
            at = furthest
        return runs, ends, held

    def _covering(
        self, marks: bytes, at: int, blocks_per_segment: int, holds: Callable[[R], H | None]
    ) -> tuple[R | None, int, H | None]:
        """Return the held run that covers the block at ``at``, begins before it and reaches furthest; None for none."""
        best, furthest, why = None, at, None
        floor = at - at % (blocks_per_segment * MARK_BYTES)
        for before in range(at - MARK_BYTES, floor - 1, -MARK_BYTES):
            for run in self.twins(marks[before : before + MARK_BYTES]):
                if before + len(run.marks) > furthest and (hold := holds(run)) is not None:
                    end = before + _shared(marks, before, run.marks)
                    if end > furthest:
                        best, furthest, why = run, end, hold
        return best, furthest, why


def _shared(marks: bytes, at: int, run: bytes) -> int:
    """Return how many bytes of marks a prompt from ``at`` on and a run have in common. O(log blocks) comparisons."""
    low, high = 0, min(len(run), len(marks) - at) // MARK_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if marks[at : at + middle * MARK_BYTES] == run[: middle * MARK_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * MARK_BYTES
