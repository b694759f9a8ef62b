"""Structured-output constraints are tried in processes of their own before a replica sees them (C6).

Invariants:

* nothing is compiled in the ingress's process, and no trial outlives its time: the kernel ends it;
* at most `AT_ONCE` trials run, one of them for any tenant, also when no request waits for them any more;
* at most `MOST_WAITING` of a tenant wait, one more is 429;
* what was tried for a tenant is remembered, so that a client that repeats itself costs one trial; what took too much,
  for a minute. Another tenant's is tried again: how long that takes tells nothing of what others have sent.

The process imports vLLM, for seconds on an idle machine and minutes on a crowded one. So it starts before the first
constraint comes, and goes on starting when a caller has waited enough. Everything here runs on the ingress's event
loop; nothing blocks it but the start of that process and short writes to its pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import pickle
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from app.gate.errors import OverloadedError, UnavailableError
from app.metrics.labels import FITS, REFUSED, TOO_LARGE, TOO_LONG, TOO_SLOW
from app.openai.constraint_worker import READY, GrammarTrial, GrammarVerdict
from configs.settings import PROJECT_ROOT

logger = logging.getLogger(__name__)

AT_ONCE = 2
MOST_WAITING = 16
MOST_REMEMBERED = 1024
TRIAL_TIMEOUT_S = 5.0
"""Longest time to build the grammar of a structured output, a regular expression or a tool call."""
START_TIMEOUT_S = 120.0
"""How long a constraint waits for the process to start."""
MOST_START_S = 600.0
"""A process that has not started in this time hangs, and is replaced by the next constraint."""
REFUSED_AGAIN_S = 60.0
"""How long what took too much is refused untried; on a machine with more time to spare it may fit."""
_GRACE_S = 10.0  # a process that is silent for this time after a trial's is not well, and is replaced


class ConstraintPool:
    """See the module's docstring."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        timeout_s: float,
        count: Callable[[str], None],
        start: Callable[[Connection], subprocess.Popen[bytes]] | None = None,
    ) -> None:
        """`timeout_s`: how long one trial may take. `count` is told the outcome of each.

        `start` starts the process that serves trials on its end of a pipe: `constraint_worker.main`'s, if not given.
        """
        self._config = vllm_config
        self._start = start or _start
        self._timeout_s = timeout_s
        self._count = count
        self._tried: OrderedDict[bytes, tuple[GrammarVerdict, float]] = OrderedDict()
        self._asking: Counter[str] = Counter()
        self._tenant_turns: dict[str, asyncio.Lock] = {}
        self._trials: set[asyncio.Task[GrammarVerdict]] = set()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._process: _Process | None = None

    async def check(self, constraint: StructuredOutputsParams, tenant: str) -> None:
        """Return if the engine can follow `constraint`.

        Raises:
            VLLMValidationError: it cannot, or not in the time and memory that a constraint may take (400).
            OverloadedError: too many of this tenant's constraints wait already (429).
            UnavailableError: the process that tries them does not start (503).
        """
        digest = hashlib.sha256(pickle.dumps((tenant, constraint))).digest()
        verdict = self._remembered(digest)
        if verdict is None:
            if self._asking[tenant] > MOST_WAITING:
                raise OverloadedError("Too many output constraints are being checked. Please try again later.")
            # A caller that goes away must not give its turn back before the trial has ended.
            trial = asyncio.get_running_loop().create_task(self._try_in_turn(digest, constraint, tenant))
            self._trials.add(trial)
            trial.add_done_callback(self._ended)
            verdict = await asyncio.shield(trial)
        _raise(verdict, self._timeout_s)

    def start(self) -> None:
        """Start the process where there is none, on the event loop: a constraint that comes later waits less for it."""
        self._started()

    def close(self) -> None:
        """End the process, and with it whatever it tries."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _ended(self, trial: asyncio.Task[GrammarVerdict]) -> None:
        self._trials.discard(trial)
        if not trial.cancelled():
            trial.exception()  # seen, also where its caller has gone

    async def _try_in_turn(self, digest: bytes, constraint: StructuredOutputsParams, tenant: str) -> GrammarVerdict:
        """One trial at a time for each tenant, `AT_ONCE` for all: a tenant's grammars hold up its own first."""
        self._asking[tenant] += 1
        try:
            async with self._tenant_turns.setdefault(tenant, asyncio.Lock()), self._turns:
                verdict = self._remembered(digest)
                if verdict is None:
                    verdict = await self._try(constraint)
                    self._remember(digest, verdict)
                return verdict
        finally:
            self._asking[tenant] -= 1
            if not self._asking[tenant]:
                del self._asking[tenant]
                self._tenant_turns.pop(tenant, None)

    async def _try(self, constraint: StructuredOutputsParams) -> GrammarVerdict:
        process = await self._running()
        try:
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                verdict = await process.tried(constraint, self._timeout_s)
        except (TimeoutError, OSError) as error:
            process.end()
            raise UnavailableError("The constraint could not be checked. Please try again later.") from error
        self._count(verdict.outcome)
        return verdict

    async def _running(self) -> _Process:
        process = self._started()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await process.ready.wait()
        except TimeoutError as error:
            logger.warning("the process that checks structured output constraints starts for long; a request is 503")
            raise UnavailableError("Structured output constraints cannot be checked now.") from error
        return process

    def _started(self) -> _Process:
        if self._process is None or not self._process.usable:
            self.close()
            self._process = _Process(self._config, self._start)
        return self._process

    def _remembered(self, digest: bytes) -> GrammarVerdict | None:
        verdict, until = self._tried.get(digest, (None, 0.0))
        if verdict is None or until < asyncio.get_running_loop().time():
            return None
        self._tried.move_to_end(digest)
        return verdict

    def _remember(self, digest: bytes, verdict: GrammarVerdict) -> None:
        lasts = math.inf if verdict.outcome in (FITS, REFUSED, TOO_SLOW) else REFUSED_AGAIN_S
        self._tried[digest] = (verdict, asyncio.get_running_loop().time() + lasts)
        if len(self._tried) > MOST_REMEMBERED:
            self._tried.popitem(last=False)


class _Process:
    """One `app.openai.constraint_worker`, and what it still owes. `ready` is set when it can be asked, or has ended."""

    def __init__(self, vllm_config: VllmConfig, start: Callable[[Connection], subprocess.Popen[bytes]]) -> None:
        self.ready = asyncio.Event()
        self.alive = True
        self._owed: dict[int, asyncio.Future[GrammarVerdict]] = {}
        self._asked = 0
        self._pipe, theirs = Pipe()
        self._process = start(theirs)
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._sending = self._loop.run_in_executor(None, self._pipe.send_bytes, pickle.dumps(vllm_config))
        self._loop.add_reader(self._pipe.fileno(), self._read)

    @property
    def usable(self) -> bool:
        """Whether it can be asked, or may yet be."""
        return self.alive and (self.ready.is_set() or self._loop.time() - self._began < MOST_START_S)

    async def tried(self, constraint: StructuredOutputsParams, timeout_s: float) -> GrammarVerdict:
        """The verdict on a constraint. Raises OSError when the process has ended or ends meanwhile."""
        if not self.alive:
            raise BrokenPipeError
        self._asked += 1
        number = self._asked
        self._owed[number] = self._loop.create_future()
        try:
            self._pipe.send(GrammarTrial(number, constraint, timeout_s))
            return await self._owed[number]
        finally:
            self._owed.pop(number, None)

    def end(self) -> None:
        """End the process; what it tries is ended by its own clock."""
        if not self.alive:
            return
        self.alive = False
        self.ready.set()
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()
        self._process.kill()
        self._process.wait()
        for owed in self._owed.values():
            if not owed.done():
                owed.set_exception(BrokenPipeError())

    def _read(self) -> None:
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            logger.warning("the process that checks structured output constraints has ended; another one is started")
            self.end()
            return
        if message == READY:
            logger.info("structured output constraints can be checked, %.0f s later", self._loop.time() - self._began)
            self.ready.set()
            return
        owed = self._owed.get(message.number)
        if owed is not None and not owed.done():
            owed.set_result(message)


def _start(pipe: Connection) -> subprocess.Popen[bytes]:
    with contextlib.closing(pipe):
        return subprocess.Popen(
            [sys.executable, "-c", f"from app.openai.constraint_worker import main; main({pipe.fileno()})"],
            cwd=PROJECT_ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[pipe.fileno()],
        )


def _raise(verdict: GrammarVerdict, timeout_s: float) -> None:
    if verdict.outcome == FITS:
        return
    message = verdict.message or "No grammar can be built for the structured output constraint."
    if verdict.outcome == TOO_LONG:
        message = (
            f"Building a grammar for the structured output constraint takes more than {timeout_s:g} s. Simplify it."
        )
    if verdict.outcome == TOO_LARGE:
        message = "Building a grammar for the structured output constraint takes too much memory. Simplify it."
    if verdict.outcome == TOO_SLOW:
        message = "Following the structured output constraint takes too long at each token. Simplify it."
    raise VLLMValidationError(message)
