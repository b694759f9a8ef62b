"""Streams that are cut, and go on elsewhere: the same engine with nothing left of the first attempt, or with its KV."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from live_engine import LiveEngine
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from deployments.engine.resume.crossing import RESUMED
from deployments.protocol.kv_port import PLAN
from load_tests.harness.memory_port import MemoryPort


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
            self.logprobs.append({token: (round(of.logprob, 4), of.rank, of.decoded_token) for token, of in at.items()})
        if output.finished:
            self.ended = (answer.finish_reason, answer.stop_reason)


class Cutter:
    """Streams of one engine. `last`: the last output of the last stream; `entered`: the tokens it went on behind."""

    def __init__(self, engine: LiveEngine) -> None:
        self.engine = engine
        self.last: Any = None
        self.entered = 0

    def whole(self, prompt: Sequence[int], params: SamplingParams) -> Said:
        """The undisturbed run, of which the device keeps nothing."""
        said = Said()
        self.engine.run(self._read(said, prompt, params, []))
        self.forget()
        return said

    def cut(self, prompt: Sequence[int], params: SamplingParams, after: int, keep: str = "nothing") -> Said:
        """Streams until `after` tokens, ends there, and goes on; `keep`: what is left of the KV meanwhile."""
        said = self._begun(prompt, params, after)
        if keep == "nothing":
            self.forget()
        elif keep == "tiers":
            self.engine.settle()
            self.engine.clear_device()
        self.entered = len(said.tokens)  # outputs that come while nobody reads are one
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
        """Its first `after` tokens or some more; on a busy machine it may be at its end before anybody reads: again."""
        for _ in range(10):
            said = Said()
            self.engine.run(self._read(said, prompt, params, [], after))
            if not said.ended and len(said.tokens) < (params.max_tokens or 0):
                break
            self.forget()
        return said

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
        transfer = {"kv_transfer_params": {PLAN: plan}}
        params.extra_args = {**transfer, **({RESUMED: resumed} if resumed else {})}
        stream = self.engine.generate(prompt, params)
        async for output in stream:
            said.hear(output)
            self.last = output
            if len(said.tokens) >= upto:
                break
        await stream.aclose()  # type: ignore[attr-defined]


@pytest.fixture
def cutter(engine: LiveEngine) -> Cutter:
    return Cutter(engine)
