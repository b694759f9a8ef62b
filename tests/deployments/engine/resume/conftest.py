"""Streams that are cut, and go on elsewhere: the same engine with nothing left of the first attempt, or with its KV."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from live_engine import LiveEngine
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from deployments.engine.resume.crossing import RESUMED
from deployments.protocol.engine_hints import EngineHints
from load_tests.harness.memory_port import MemoryPort


class CloseTo(float):
    """A logprob, equal to another within what a processor may make of another order of additions."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) <= 1e-4

    __hash__ = None  # type: ignore[assignment]


@dataclass
class Said:
    """What a client has had of an answer."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    ended: Any = None

    def hear(self, output: Any) -> None:
        (answer,) = output.outputs
        self.tokens += answer.token_ids
        self.text += answer.text
        for at in answer.logprobs or []:
            self.logprobs.append({token: (CloseTo(of.logprob), of.rank, of.decoded_token) for token, of in at.items()})
        if output.finished:
            self.ended = (answer.finish_reason, answer.stop_reason)


class Cutter:
    """Streams of one engine. `last`: the last output of the last stream; `entered`: the tokens it went on behind.

    `known`: answers of undisturbed runs, by what was asked.
    """

    def __init__(self, engine: LiveEngine, known: dict[str, Said]) -> None:
        self.engine = engine
        self._known = known
        self.last: Any = None
        self.entered = 0
        self._hang_up = threading.Event()

    def undisturbed(self, prompt: Sequence[int], params: SamplingParams) -> Said:
        """The answer of a whole run, this one or an earlier one."""
        asked = f"{prompt} {params}"
        if asked not in self._known:
            self._known[asked] = self.whole(prompt, params)
        return copy.deepcopy(self._known[asked])

    def whole(self, prompt: Sequence[int], params: SamplingParams) -> Said:
        """A run without a cut, of which the device keeps nothing."""
        said = Said()
        self.engine.run(self._read(said, prompt, params, []))
        self.forget()
        return said

    def cut(self, prompt: Sequence[int], params: SamplingParams, after: int, keep: str = "nothing") -> Said:
        """Streams `after` tokens, ends there, and goes on; `keep`: what is left of the KV meanwhile."""
        said = self._begun(prompt, params, after)
        if keep == "nothing":
            self.forget()
        elif keep == "tiers":
            self.engine.settle()
            self.engine.clear_device()
        self.entered = after
        self.engine.run(self._read(said, prompt, params, list(said.tokens)))
        return said

    def naive(self, prompt: Sequence[int], params: SamplingParams, after: int) -> Said:
        """The same with the answered tokens as a part of a new prompt."""
        said = self._begun(prompt, params, after)
        self.forget()
        params = copy.deepcopy(params)
        params.max_tokens = (params.max_tokens or 0) - len(said.tokens)
        self.engine.run(self._read(said, [*prompt, *said.tokens], params, []))
        return said

    def _begun(self, prompt: Sequence[int], params: SamplingParams, after: int) -> Said:
        """Its first `after` tokens."""
        said = Said()
        with self._step_by_step(said):
            self.engine.run(self._read(said, prompt, params, [], after))
        assert (len(said.tokens), said.ended) == (after, None), "the answer is longer than the cut"
        return said

    @contextlib.contextmanager
    def _step_by_step(self, said: Said) -> Iterator[None]:
        """The engine computes no token before the client has had the one before: not on a busy machine either."""
        core: Any = self.engine.thread.core
        step = core.step_fn
        self._hang_up = threading.Event()

        def gated() -> Any:
            while any(request.num_output_tokens > len(said.tokens) for request in core.scheduler.running):
                if self._hang_up.wait(0.001):
                    break
            return step()

        self.engine.on_engine_thread(lambda: setattr(core, "step_fn", gated))
        try:
            yield
        finally:
            self._hang_up.set()
            self.engine.on_engine_thread(lambda: setattr(core, "step_fn", step))

    def forget(self) -> None:
        self.engine.settle()
        self.engine.port = MemoryPort()
        self.engine.clear_device()

    async def _read(
        self, said: Said, prompt: Sequence[int], params: SamplingParams, resumed: list[int], upto: int = 1 << 30
    ) -> None:
        params = copy.deepcopy(params)
        params.output_kind = RequestOutputKind.DELTA
        plan = self.engine.port.plan(self.engine.hashes([*prompt, *resumed]))
        transfer = {"kv_transfer_params": EngineHints(plan).as_transfer()}
        params.extra_args = {**transfer, **({RESUMED: resumed} if resumed else {})}
        stream = self.engine.generate(prompt, params)
        async for output in stream:
            said.hear(output)
            self.last = output
            if len(said.tokens) >= upto:
                self._hang_up.set()  # the engine takes the abort between two steps
                break
        await stream.aclose()  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def undisturbed_answers() -> dict[str, Said]:
    return {}


@pytest.fixture
def cutter(engine: LiveEngine, undisturbed_answers: dict[str, Said]) -> Cutter:
    return Cutter(engine, undisturbed_answers)
