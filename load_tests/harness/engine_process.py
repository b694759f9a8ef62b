"""An engine in a process of its own, asked through a pipe: vLLM keeps one engine's state per process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, Protocol

import psutil

from configs.settings import load_settings
from deployments.engine.engine_args import engine_environment
from load_tests.measuring.processes import CPUMeter, pss_bytes

START_S = 600.0
ANSWER_S = 1800.0
"""Longest wait for one measurement; reached only when something hangs."""
END_S = 30.0


class EngineSpec(Protocol):
    """Which engine; travels to its process."""

    def open(self, folder: str) -> Any:
        """The engine in this process, of the model in `folder`: a host with methods to call, and `close`."""
        ...


class EngineError(Exception):
    """The engine did not start, or a measurement failed."""


class EngineProcess:
    """Starts with the constructor; raises EngineError. What it prints goes to `log`."""

    def __init__(self, spec: EngineSpec, folder: str, log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._log = log
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_host, args=(spec, folder, str(log), theirs))
        self._process.start()
        theirs.close()
        self._meter = CPUMeter(psutil.Process(self._process.pid))
        try:
            self._hear(START_S)
        except BaseException:
            self.close(at_once=True)
            raise

    def call(self, method: str, **arguments: Any) -> Any:
        """What the host's method returns. Raises EngineError."""
        self._pipe.send((method, arguments))
        return self._hear(ANSWER_S)

    def memory_bytes(self) -> tuple[int, int]:
        """PSS of the engine's process, and of all processes below it together."""
        top = psutil.Process(self._process.pid)
        own = int(top.memory_full_info().pss)
        return own, max(0, pss_bytes(top) - own)

    def cpu_s(self) -> float:
        """Processor time so far of the engine's process and all below."""
        return self._meter.seconds()

    def close(self, at_once: bool = False) -> None:
        """End the engine and what it started; `at_once`: in the middle of what it is doing."""
        with contextlib.suppress(OSError):
            if not at_once:
                self._pipe.send(None)
        if at_once:
            self._process.terminate()
        self._process.join(END_S)
        if self._process.is_alive() and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # its group is its own, see `_host`
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()

    def _hear(self, patience_s: float) -> Any:
        try:
            if not self._pipe.poll(patience_s):
                raise EngineError(f"the engine does not answer; see {self._log}")
            kind, found = self._pipe.recv()
        except (EOFError, OSError):
            raise EngineError(f"the engine's process ended; see {self._log}") from None
        if kind == "error":
            raise EngineError(f"{found}; see {self._log}")
        return found


def _host(spec: EngineSpec, folder: str, log: str, pipe: Any) -> None:
    """The engine's process."""
    os.setpgid(0, 0)  # Ctrl-C in the terminal is for the parent, which ends this one in order
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with Path(log).open("a", encoding="utf-8") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    # Before torch is loaded, which reads how many threads it may use; vLLM does not let that change afterwards.
    os.environ.update(engine_environment(load_settings({"model": folder})))
    try:
        with contextlib.closing(spec.open(folder)) as host:
            pipe.send(("found", None))
            while (job := pipe.recv()) is not None:
                method, arguments = job
                pipe.send(("found", getattr(host, method)(**arguments)))
    except EOFError:
        pass
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(("error", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))
