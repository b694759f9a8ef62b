"""State of an engine's process that its replica reads without asking it: its beat, and the suspects of a sudden death.

Lies in memory that both processes have (`shared`), without a name that could be left behind. The engine's process
writes, on the engine thread but for the pulse; the replica reads while it lives and after it.

A step that is computed is noted with its suspects. Of a step that is planned, or that only waits for loads, the
replica's own books tell which requests were not computed yet: those without output. That includes a request in the
middle of a long prompt, which the engine's own books would have cleared.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Sequence
from enum import IntEnum

from deployments.engine.heartbeat import Beat

NAMES_BYTES = 256 * 1024
"""What is beyond is left out: some 4,000 requests in one step."""
_WORDS_BYTES = 4096
_SEPARATOR = "\n"


class Stage(IntEnum):
    """The stage that an engine was in when it ended."""

    BETWEEN_STEPS = 0
    PLANNING = 1
    """Or waiting for loads."""
    COMPUTING = 2


class FlightRecorder(ctypes.Structure):
    """See the module's docstring."""

    _fields_ = (
        ("beat", Beat),
        ("stage", ctypes.c_uint8),
        ("_names", ctypes.c_char * NAMES_BYTES),
        ("_words", ctypes.c_char * _WORDS_BYTES),
    )
    beat: Beat
    stage: int
    _names: bytes
    _words: bytes
    _noted: list[str]

    @staticmethod
    def shared() -> FlightRecorder:
        """One that can be sent to a process as it is spawned."""
        recorder: FlightRecorder = multiprocessing.get_context("spawn").RawValue(FlightRecorder)
        return recorder

    # The engine's process.

    def planning(self) -> None:
        """Note a step whose requests are not known yet."""
        self.stage = Stage.PLANNING

    def computing(self, suspects: Sequence[str]) -> None:
        """Of the step that begins, by the engine's ids. Cheap where they are those of the step before."""
        if suspects != getattr(self, "_noted", None):
            self._noted = list(suspects)
            written = _SEPARATOR.join(suspects).encode()
            if len(written) >= NAMES_BYTES:
                written = written[: written.rindex(_SEPARATOR.encode(), 0, NAMES_BYTES)]
            self._names = written
        self.stage = Stage.COMPUTING

    def between_steps(self) -> None:
        """No request is to blame for what happens now."""
        self.stage = Stage.BETWEEN_STEPS

    def died(self, error: BaseException, suspects: Sequence[str]) -> None:
        """The last words: the engine raised."""
        self._words = repr(error).encode()[: _WORDS_BYTES - 1]
        if suspects:
            self.computing(suspects)
        else:
            self.between_steps()

    # The replica.

    @property
    def last_words(self) -> str:
        """The error that ended the engine; empty: it had no time to say."""
        return self._words.decode(errors="replace")

    def suspects(self) -> list[str] | None:
        """Requests that may have ended the engine, by the engine's ids; None: the replica's own books tell."""
        if self.stage == Stage.COMPUTING:
            return self._names.decode().split(_SEPARATOR)
        return None if self.stage == Stage.PLANNING else []
