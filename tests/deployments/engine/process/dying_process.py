"""A process of the engine's that is killed in a step. It needs no vLLM, which takes seconds to import."""

from __future__ import annotations

import os
import signal

from deployments.engine.process.flight_recorder import FlightRecorder


def die_in_a_step(recorder: FlightRecorder) -> None:
    recorder.beat.count += 1
    recorder.computing(["one", "two"])
    os.kill(os.getpid(), signal.SIGKILL)
