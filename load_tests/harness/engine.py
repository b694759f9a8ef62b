"""A vLLM engine in this process, as a replica has it, without HTTP, Serve and Ray: the one of all benchmarks and tests.

One at a time: vLLM keeps an engine's state per process. vLLM is imported when the first one is started, for it reads
from the environment what a replica's environment holds.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configs.blending import DEFAULT_CHECK_LAYER, DEFAULT_RECOMPUTE_RATIO
from configs.settings import Settings
from deployments.protocol.engine_hints import EngineHints, extra
from deployments.protocol.wire import KV_CACHE_USAGE
from kvmanager.moves.plan import Plan
from kvmanager.segments.keys import BLENDED, EXACT, AdapterName, BlockHash, Fidelity, block_hashes, cache_salt
from kvmanager.segments.server_secret import ServerSecret
from load_tests.harness.patience import PATIENCE_S, patience

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput

SECRET = ServerSecret(bytes(32))


@dataclass(frozen=True, slots=True)
class Timed:
    """Prompts that were sent at once: seconds until the last token, to the first token of each, and per further token
    (their means), and where the last prompt's KV came from (empty: plain vLLM)."""

    seconds: float
    ttft_s: float
    tpot_s: float
    usage: dict[str, Any]


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids without a meaning; equal seeds give equal beginnings."""
    draw = random.Random(seed)
    return [draw.randrange(10, 500) for _ in range(tokens)]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Return greedy parameters for exactly `max_tokens` tokens."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


async def timed(streams: Sequence[AsyncIterator[RequestOutput]], max_tokens: int) -> Timed:
    """Read vLLM's outputs of prompts that are sent at once."""
    began = time.perf_counter()

    async def read(stream: AsyncIterator[RequestOutput]) -> tuple[float, float, dict[str, Any]]:
        first = last = 0.0
        usage: dict[str, Any] = {}
        async for output in stream:
            last = time.perf_counter()
            first = first or last
            usage = (output.kv_transfer_params or {}).get(KV_CACHE_USAGE, usage)
        return first - began, (last - first) / max(1, max_tokens - 1), usage

    found = await asyncio.gather(*map(read, streams))
    seconds = time.perf_counter() - began
    count = len(found)
    return Timed(seconds, sum(one[0] for one in found) / count, sum(one[1] for one in found) / count, found[-1][2])


class PortSwitch:
    """A `KVPort` that passes everything to `port`, which may be replaced."""

    def __init__(self, port: Any) -> None:
        self.port = port

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)


class Engine:
    """With KV reuse over `port`, a `deployments.protocol.kv_port.KVPort`; without one plain vLLM. Use on one event
    loop."""

    def __init__(self, settings: Settings, port: Any = None) -> None:
        """`settings.kv.enabled` and `port` go together."""
        from deployments.engine.engine_args import engine_config, engine_environment

        os.environ.update(engine_environment(settings))
        from deployments.engine.adapters import load_adapters
        from deployments.engine.directive_runner import DirectiveRunner
        from deployments.engine.host import start_engine
        from deployments.engine.model_identity import model_identity
        from deployments.engine.wiring import KVReuse

        config = engine_config(settings)
        self.block_tokens = settings.block_size_tokens
        self.fingerprint = model_identity(config, settings).fingerprint()
        self.llm, self.thread = start_engine(config)
        load = functools.partial(load_adapters, self.thread.core, settings)
        self.adapters: Mapping[AdapterName, LoRARequest] = self.thread.call(load).result()
        self.adapter: AdapterName | None = None
        """The LoRA adapter that answers from now on; None: the model itself. `salt` must be of it."""
        self._ids = itertools.count(1)
        self.reuses = port is not None
        if self.reuses:
            self.salt = cache_salt(SECRET, self.fingerprint, "")
            self._switch = PortSwitch(port)
            self.reuse = KVReuse(self.thread, self.llm.vllm_config, settings, self._switch, self.fingerprint, "0")
            self.orders = DirectiveRunner(self.reuse.control, self.thread.call)

    @property
    def port(self) -> Any:
        """What the connector stores into and loads from."""
        return self._switch.port

    @port.setter
    def port(self, port: Any) -> None:
        self._switch.port = port

    def hashes(self, tokens: Sequence[int]) -> list[BlockHash]:
        """The prompt's block hashes."""
        return block_hashes(tokens, self.block_tokens, self.salt, self.adapter)

    def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        hints: EngineHints | None = None,
        salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """vLLM's outputs for a prompt; `hints` are its own, `salt` another one than `self.salt`."""
        request: Any = {"type": "token", "prompt_token_ids": list(tokens)}
        if self.reuses:
            request["cache_salt"] = salt or self.salt
        if hints is not None:
            params.extra_args = {"kv_transfer_params": hints.as_transfer()}
        adapter = self.adapters[self.adapter] if self.adapter else None
        return self.llm.generate(request, params, f"request-{next(self._ids)}", lora_request=adapter)

    def stream(self, tokens: Sequence[int], params: SamplingParams) -> AsyncIterator[RequestOutput]:
        """The same, with whatever plan the port has for the prompt."""
        return self.generate(tokens, params, EngineHints(self.port.plan(self.hashes(tokens))) if self.reuses else None)

    def blended_salt(self, ratio: float = DEFAULT_RECOMPUTE_RATIO) -> str:
        """What blended prompts are named with, where there are no tenants."""
        from kvmanager.extensions.blend.chunks import blend_variant  # a core without it runs too

        return cache_salt(SECRET, self.fingerprint, "", BLENDED, blend_variant(ratio))

    def blend_plan(
        self,
        tokens: Sequence[int],
        chunks: Sequence[range],
        ratio: float = DEFAULT_RECOMPUTE_RATIO,
        check_layer: int = DEFAULT_CHECK_LAYER,
        seconds: float = 0.0,
    ) -> Plan:
        """What a port in memory has of a blended prompt: of its beginning, and of its chunks, positions of `tokens`.

        A chunk is stored by asking for it alone: `stream(tokens[chunk.start : chunk.stop], greedy(1))`.
        """
        own = block_hashes(tokens, self.block_tokens, self.blended_salt(ratio))
        names = [(chunk.start, self.hashes(tokens[chunk.start : chunk.stop])) for chunk in chunks]
        plan: Plan = self.port.plan_blend(own, names, ratio, check_layer, seconds)
        return plan

    def blended(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        plan: Plan,
        fidelity: Fidelity = BLENDED,
        ratio: float = DEFAULT_RECOMPUTE_RATIO,
    ) -> AsyncIterator[RequestOutput]:
        """vLLM's outputs for a prompt with such a plan; `reuse.paths["blend"].counters.last`: parts of the last blend.

        `ratio`: what names it where the plan has nothing to blend.
        """
        from kvmanager.extensions.blend.chunks import BLEND, PlannedBlend  # a core without it runs too

        blend = extra(plan, BLEND, PlannedBlend)
        salt = (
            cache_salt(SECRET, self.fingerprint, "", fidelity)
            if fidelity != BLENDED
            else self.blended_salt(blend.ratio if blend else ratio)
        )
        return self.generate(tokens, params, EngineHints(plan, fidelity=fidelity), salt)

    async def serve(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timed:
        """Prompts that are sent at once."""
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA
        return await timed([self.stream(one, greedy(max_tokens, output_kind=kind)) for one in prompts], max_tokens)

    def wait_for_saves(self) -> None:
        """Until everything that was submitted so far is saved or dropped. Blocks; raises TimeoutError."""
        from deployments.protocol.kv_port import OfferedBlocks
        from deployments.transfer.threads import SaveJob

        saved = threading.Event()
        self.reuse.transfer.submit_save(SaveJob(OfferedBlocks((), 0, 0, 0), (), saved.set, EXACT))
        if not saved.wait(patience(PATIENCE_S)):
            raise TimeoutError("saves do not end")

    async def empty_device(self) -> None:
        """When nothing is being saved any more, the device forgets all."""
        await asyncio.to_thread(self.wait_for_saves)
        await asyncio.wrap_future(self.reuse.clear_device())

    def close(self) -> None:
        """End the engine."""
        if self.reuses:
            self.reuse.close()
        self.llm.shutdown()
