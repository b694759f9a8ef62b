"""The threads of an engine that runs in a benchmark's own process."""

from __future__ import annotations

import os
import sys

from configs.sections import EngineSettings

_VARIABLE = "OMP_NUM_THREADS"


def start_with_engine_threads(module: str) -> None:
    """Begin `python -m module` anew with the threads that a replica's engine has by default, unless it was begun so.

    OpenMP reads the variable when torch is loaded, which the imports of `module` have done by now. Telling torch later
    reaches some of its kernels only: an engine of "one thread" then computes with all cores, and what runs beside it
    costs it more than it would cost a replica.
    """
    threads = str(EngineSettings().threads)
    if os.environ.get(_VARIABLE) != threads:
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, _VARIABLE: threads})
