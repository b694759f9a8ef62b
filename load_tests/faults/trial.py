"""One fault at a time: streams that run when it strikes, streams that begin under it, and streams after it.

Every answer is held against the one that the same server gave before anything was stored. The requests' KV is *parked*
in one tier before each run (and cleared above it), so that the fault strikes what is being read. Of blended prompts it
is the documents' KV, and the answers that they are held against are exact ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import httpx

from load_tests.faults.catalogue import Fault, World
from load_tests.faults.prompts import (
    AFTER,
    PHASES,
    PROMPT_TOKENS,
    QUIET,
    STRUCK,
    UNDER,
    TrialPrompts,
    chunked_prompts,
    document_token,
    plain_prompts,
)
from load_tests.faults.streams import Stream, run_stream, run_streams
from load_tests.harness.client import Client
from load_tests.harness.conversations import text, tokenize
from load_tests.harness.server import ServerError

FIRST_TOKENS_S = 30.0
HEALTH_EVERY_S = 0.1
SAY_SO_S = 20.0
COME_BACK_S = 90.0
PARK_S = 20.0
BLENDS = "crosskv_blend_seconds_count"


@dataclass
class Outcome:
    """What was seen. `problems` is empty when everything was as it must be."""

    part: str
    fault: str
    requests: int = 0
    broken_streams: int = 0
    worst_quiet_s: float = 0.0
    worst_s: float = 0.0
    worst_quiet_first_token_s: float = 0.0
    worst_first_token_s: float = 0.0
    health_said: dict[str, str] = field(default_factory=dict)
    back_after_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def extra_s(self) -> float:
        """Extra latency of the worst request, against the worst of the same requests undisturbed."""
        return self.worst_s - self.worst_quiet_s

    @property
    def extra_first_token_s(self) -> float:
        """The same, of the time to the first token."""
        return self.worst_first_token_s - self.worst_quiet_first_token_s

    @property
    def health_in_words(self) -> str:
        """What /health said of the parts."""
        return "; ".join(f"{part}: {state}" for part, state in self.health_said.items())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "extra_s": self.extra_s, "extra_first_token_s": self.extra_first_token_s}


class Trials:
    """Trials on one server. Building it clears the caches and computes the reference answers.

    Nothing else may use the server meanwhile.
    """

    def __init__(
        self, world: World, model: str, seed: int, streams: int = 6, answer_tokens: int = 64, blended: bool = False
    ) -> None:
        """`streams`: requests at once, and prompts; each is asked for `answer_tokens`.

        `blended`: prompts of documents, for `BLEND_FAULTS`.
        """
        self._world = world
        self._server = world.server
        self._model = model
        self._streams = streams
        self._answer_tokens = answer_tokens
        self._server.clear("device", "cpu", "redis")
        self._prompts = asyncio.run(self._make_prompts(Random(seed), blended))
        self._answers: dict[str, list[list[int]]] = {}
        for phase in PHASES if blended else PHASES[:1]:
            cold = self._ask(self._prompts.by_phase[phase])
            self._answers[phase] = [stream.tokens for stream in cold]
            lacking = [stream.error for stream in cold if stream.error or len(stream.tokens) != answer_tokens]
            if lacking:
                raise ServerError(f"the undisturbed server does not answer: {lacking}")
        self._block_tokens = int(self._server.lookup([0])["block_size_tokens"])

    def run(self, fault: Fault, timed: bool = False) -> Outcome:
        """Cause the fault once, and see what comes of it; if `timed`, against the same requests undisturbed."""
        outcome = Outcome(fault.part, fault.name)
        server = self._server
        try:
            quiet: list[Stream] = []
            if timed:
                self._park(fault.parked_in)
                quiet = self._stream(QUIET, fault)
                self._judge(outcome, fault, quiet, QUIET)
            self._park(fault.parked_in)
            server.wait_until_idle()
            blends, spared = self._blends(), self._spared(fault)
            with self._watched_health(outcome), contextlib.ExitStack() as lasting:
                struck = asyncio.run(self._strike(fault, lasting))
                self._judge(outcome, fault, struck, STRUCK)
                under = self._stream(UNDER, fault)
                self._judge(outcome, fault, under, UNDER)
                if fault.missing:
                    server.wait_until(
                        lambda: fault.missing in outcome.health_said, f"/health names {fault.missing}", SAY_SO_S
                    )
            began = time.monotonic()
            server.wait_until(lambda: server.health()["status"] == "ok", "/health is ok again", COME_BACK_S)
            self._judge(outcome, fault, self._stream(AFTER, fault), AFTER)
            if gone := spared - self._spared(fault):
                outcome.problems.append(f"it ended processes that it should have spared: {sorted(gone)}")
            if self._prompts.blended:  # all is stored again then; what a lost answer holds would be in the way
                server.wait_until_idle()
            self._park("redis")
            outcome.back_after_s = time.monotonic() - began
            if self._prompts.blended and fault.ratio == 1 and self._blends() == blends:
                outcome.problems.append("nothing was blended")
            server.wait_until_idle()
            if timed:
                outcome.worst_quiet_s = max(stream.seconds for stream in quiet)
                outcome.worst_quiet_first_token_s = max(stream.first_token_s for stream in quiet)
            outcome.worst_s = max(stream.seconds for stream in struck + under)
            outcome.worst_first_token_s = max(stream.first_token_s for stream in struck + under)
        except (ServerError, TimeoutError, httpx.HTTPError) as error:
            outcome.problems.append(f"{type(error).__name__}: {error}")
        return outcome

    async def _make_prompts(self, rng: Random, blended: bool) -> TrialPrompts:
        async with Client(self._server.url, self._model, timeout_s=60) as client:
            words = await tokenize(client, text(rng, 3 * self._streams * PROMPT_TOKENS))
        if blended:
            return chunked_prompts(rng, words, document_token(self._server.model_folder), self._streams)
        return plain_prompts(words, self._streams)

    def _ask(
        self, prompts: Sequence[list[int]], extra: Mapping[str, Any] | None = None, max_tokens: int | None = None
    ) -> list[Stream]:
        tokens = max_tokens or self._answer_tokens
        return asyncio.run(run_streams(self._server.url, self._model, prompts, tokens, extra))

    def _stream(self, phase: str, fault: Fault) -> list[Stream]:
        return self._ask(self._prompts.by_phase[phase], self._prompts.body(fault.ratio))

    def _spared(self, fault: Fault) -> set[int]:
        """The numbers of the processes that outlive it."""
        return {process.pid for process in self._server.processes(fault.spares)} if fault.spares else set()

    def _blends(self) -> float:
        """How many there were."""
        return self._server.metric(BLENDS) if self._prompts.blended else 0.0

    async def _strike(self, fault: Fault, lasting: contextlib.ExitStack) -> list[Stream]:
        """Half of the streams have sent tokens when the fault strikes, the other half begin right after, or with it.

        All of them are sent again, and returned after the others, until it has struck.
        """
        if fault.ratio < 1:  # the answers of early streams would be a blend's
            await asyncio.to_thread(lasting.enter_context, fault.inject(self._world))
            return []
        streams = [Stream(prompt) for prompt in self._prompts.by_phase[STRUCK]]
        extra = self._prompts.body(fault.ratio)
        early, late = streams[: self._streams // 2], streams[self._streams // 2 :]
        async with Client(self._server.url, self._model, timeout_s=120) as client:

            def send(stream: Stream) -> asyncio.Task[None]:
                return asyncio.create_task(run_stream(client, stream, self._answer_tokens, extra))

            tasks = [send(stream) for stream in early]
            async with asyncio.timeout(FIRST_TOKENS_S):
                await asyncio.gather(*(stream.begun.wait() for stream in early))
            striking = asyncio.create_task(asyncio.to_thread(lasting.enter_context, fault.inject(self._world)))
            if not fault.strikes_at_once:
                await striking
            tasks += [send(stream) for stream in late]
            await asyncio.gather(*tasks)
            while not striking.done():  # a fault that waits for a busy replica: on a busy machine it comes too late
                again = [Stream(prompt) for prompt in self._prompts.by_phase[STRUCK]]
                streams += again
                await asyncio.gather(*map(send, again))
            await striking
        return streams

    def _park(self, tier: str) -> None:
        """Have the full blocks of all that is to be stored in `tier` and in no faster one.

        Of blended prompts nothing else is there then. What is stored nowhere is computed again. Tried a few times: a
        save or a promotion is dropped when its tier has something better to do.
        """
        if self._prompts.blended:  # their own KV, and that of the exact ones, would be found first
            self._server.clear("device", "cpu", "redis")
        faster = {"redis": ("device", "cpu"), "cpu": ("device",)}[tier]

        def stored() -> list[int]:
            return [int(self._server.lookup(prompt)[tier]) for prompt in self._prompts.stored]

        wanted = [len(prompt) // self._block_tokens for prompt in self._prompts.stored]
        for last in (False, False, True):
            if stored() != wanted:
                self._server.clear("device", "cpu")
                self._ask(self._prompts.stored, max_tokens=1 if self._prompts.blended else None)
            try:
                self._server.wait_until(lambda: stored() == wanted, f"all prompts are stored in {tier}", PARK_S)
                break
            except ServerError as error:
                if last:
                    raise ServerError(f"{error}: {stored()} of {wanted} blocks; {self._server.stats()}") from None
        self._server.clear(*faster)

    def _judge(self, outcome: Outcome, fault: Fault, streams: Sequence[Stream], when: str) -> None:
        """Note every stream that is not right: the same tokens, to the last one.

        `streams`: one for each prompt of the phase, or several rounds of them.
        Where a fault has blended prompts reuse what it does not take, only those under it have an exact answer.
        """
        outcome.requests += len(streams)
        answers = self._answers[when if self._prompts.blended else QUIET] if streams else []
        rounds = len(streams) // max(1, len(answers))
        for stream, answer in zip(streams, answers * rounds, strict=True):
            if (fault.ratio == 1 or when == UNDER) and stream.tokens != answer[: len(stream.tokens)]:
                outcome.problems.append(f"{when}: wrong tokens")
            elif fault.breaks and when != AFTER and not stream.ended:
                outcome.broken_streams += 1
            elif stream.error:
                outcome.broken_streams += 1
                outcome.problems.append(f"{when}: {stream.error} (after {len(stream.tokens)} tokens)")
            elif not stream.ended or len(stream.tokens) != len(answer):
                outcome.problems.append(f"{when}: the stream ended without an error after {len(stream.tokens)} tokens")

    @contextlib.contextmanager
    def _watched_health(self, outcome: Outcome) -> Iterator[None]:
        """Note in `outcome.health_said` every part that /health names meanwhile."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(HEALTH_EVERY_S):
                with contextlib.suppress(httpx.HTTPError, ValueError, ServerError):
                    for part, report in self._server.health()["parts"].items():
                        if report["state"] != "ok":
                            outcome.health_said[part] = report["state"]

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
