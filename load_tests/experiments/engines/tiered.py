"""An engine with KV reuse, a CPU tier and Redis in this process and below it, and what moving a prompt's KV takes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.settings import load_settings
from deployments.engine.load_paths.sparse.path import opener
from deployments.redis_tier.server import EmbeddedRedis
from deployments.segment_store.segment_codecs import CACHEGEN, LOSSLESS, RAW_CODING, Coding, FormLevel
from deployments.segment_store.sparse.coding import SparseCoding
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.format import RAW
from kvmanager.segments.keys import EXACT, TOLERANT, Fidelity, cache_salt
from load_tests.experiments.sizes import STEP_TOKENS
from load_tests.harness.emulated_link import EmulatedLink
from load_tests.harness.engine import SECRET, Timed, greedy, prompt, timed
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import PATIENCE_S
from load_tests.harness.tiered_engine import TieredEngine
from load_tests.harness.tiers import MIB, running

WARM_UP_TOKENS = 512
POLL_S = 0.002
LINK_DELAY_S = 0.0002
"""Of a link whose rate is given: a round trip within a data centre."""
PROBE_S = 15.0
"""Longest wait for a copy to a Redis tier that has just been started."""
SPARSE = "50"
"""The level of `kv.sparse` that needs no measurement of the model, and keeps about as much as a calibrated one."""
CODECS: dict[str, tuple[Coding, Fidelity]] = {
    RAW: (RAW_CODING, EXACT),
    LOSSLESS: (Coding(LOSSLESS, RAW), EXACT),
    "cachegen 1": (Coding(RAW, CACHEGEN, 1), TOLERANT),
    CACHEGEN: (Coding(RAW, CACHEGEN, 2), TOLERANT),
    "cachegen 3": (Coding(RAW, CACHEGEN, 3), TOLERANT),
    "sparse": (Coding(RAW, RAW, form=FormLevel("sparse", SPARSE)), TOLERANT),
    "sparse 75": (Coding(RAW, RAW, form=FormLevel("sparse", "75")), TOLERANT),
    "sparse 20": (Coding(RAW, RAW, form=FormLevel("sparse", "20")), TOLERANT),
    "sparse + cachegen": (Coding(RAW, CACHEGEN, 2, form=FormLevel("sparse", SPARSE)), TOLERANT),
}
"""How Redis stores, and the fidelity of the prompts that it stores so: `kv.redis_codec`, `kv.tolerant_level`,
`kv.sparse`."""
SEEDS = itertools.count(1)
DOCUMENTS, SYSTEM_TOKENS = 6, 40
"""Of a blended prompt, and the tokens before and behind them."""


class CodedEngine(TieredEngine):
    """A `TieredEngine` whose Redis tier stores with the codec, and whose prompts have the fidelity, that is chosen."""

    def __init__(self, server: EmbeddedRedis, model: str, dtype: str) -> None:
        kv = {
            "cpu_tier_bytes": 128 * MIB, "redis_bytes": 256 * MIB, "load_or_recompute": "load", "sparse": SPARSE,
        }  # fmt: skip
        engine = {"device_blocks": 512, "max_num_seqs": 16, "max_num_batched_tokens": STEP_TOKENS}
        settings = load_settings({"model": model, "dtype": dtype, "engine": engine, "kv": kv})
        self._folder = tempfile.TemporaryDirectory(prefix="crosskv-")
        self.link = EmulatedLink(control_file=str(Path(self._folder.name) / "link"), shared=True)
        self.link.throttle(0.0)
        super().__init__("experiments", settings, server, link=self.link)
        self._coding = RAW_CODING
        self._sparse = SparseCoding(self._coding, self.fingerprint)
        if (why := self.reuse.paths["sparse"].accept(self._open_kept)) is not None:
            raise RuntimeError(f"the engine presents no sparse prefix: {why}")
        self.plan_sparse(None)

    async def choose(self, codec: str) -> bool:
        """Forget everything; from now on Redis stores with `codec` (of `CODECS`), and prompts have its fidelity.

        Returns whether the workers were restarted for it: the first use of anything in them is slow.
        """
        wanted, _ = CODECS[codec]
        if wanted == self._coding:
            await self.begin(codec)
            return False
        if not told_apart(self._coding, wanted):
            await self._store_with(RAW)
        await self._store_with(codec)
        return True

    async def begin(self, codec: str) -> None:
        """Prompts are those of the codec; nothing of other ones is there."""
        coding, self.fidelity = CODECS[codec]
        self.salt = cache_salt(SECRET, self.fingerprint, "", self.fidelity)
        await self.forget()
        self._sparse = SparseCoding(coding, self.fingerprint)
        self.plan_sparse(self._sparse.budgets(len(self.reuse.copier.layers)))

    async def _store_with(self, codec: str) -> None:
        await self.begin(codec)
        self._coding, _ = CODECS[codec]
        await asyncio.to_thread(self.tiers.restart_redis, self._coding)
        self.tiers.wait_until_ready(self.keep_alive)
        end = time.monotonic() + PATIENCE_S
        while not await self._stores_with(codec):
            if time.monotonic() > end:
                raise TimeoutError(f"Redis does not store with {codec}")

    def close(self) -> None:
        """See `TieredEngine.close`."""
        super().close()
        self._folder.cleanup()

    def _open_kept(self, sealed: memoryview, load: PlannedLoad, form: bytes) -> Sequence[Any]:
        return opener(self._sparse, self.reuse.copier)(sealed, load, form)

    async def swap_out(
        self, tokens: Sequence[int], max_tokens: int = 1, patience_s: float = PATIENCE_S
    ) -> tuple[Timed, dict[str, float]]:
        """Compute a prompt, and only then save it; seconds from there until each tier has all of it.

        Raises TimeoutError when a tier does not get it.
        """
        hashes = self.hashes(tokens)
        self.port.begin.clear()
        try:
            found = await self.serve([tokens], max_tokens)
        finally:
            began = time.perf_counter()
            self.port.begin.set()
        taken = {}
        for tier in ("cpu", "redis"):
            await self._until_stored(tier, hashes, patience_s)
            taken[tier] = time.perf_counter() - began
        await self.rest()
        return found, taken

    async def _until_stored(self, tier: str, hashes: Sequence[bytes], patience_s: float) -> None:
        end, reach = time.monotonic() + patience_s, "redis_in_any_form" if tier == "redis" else tier
        while (await asyncio.to_thread(self.tiers.ask, "api", "lookup", hashes))[reach] < len(hashes):
            if time.monotonic() > end:
                raise TimeoutError(f"the {tier} tier did not get the prompt's KV")
            self.keep_alive()
            await asyncio.sleep(POLL_S)

    async def _stores_with(self, codec: str) -> bool:
        """Whether a new prompt's KV lies in Redis in that codec; forgets everything."""
        with contextlib.suppress(TimeoutError):  # a copy that failed while the workers restart is not tried again
            await self.swap_out(prompt(next(SEEDS), WARM_UP_TOKENS), patience_s=PROBE_S)
        stored = self.tiers.stored_bytes()
        known = self.tiers.ask_tier("stats")["codecs"]
        await self.forget()
        if codec == RAW:
            return stored["redis"] == stored["cpu"] > 0
        named = self._coding.form is not None or codec.split()[0] in known
        return named and 0 < stored["redis"] < stored["cpu"]


def told_apart(one: Coding, other: Coding) -> bool:
    """Whether bytes and codecs' names show which of them a prompt was stored with. Raw bytes differ from all others."""
    if RAW_CODING in (one, other):
        return True
    return one.form is other.form is None and (one.exact, one.tolerant) != (other.exact, other.tolerant)


class TieredHost:
    """The host of a tiered `EngineSpec`. Its methods are called one after the other; each prompt is a new one."""

    def __init__(self, folder: str, dtype: str) -> None:
        with contextlib.ExitStack() as parts:
            server = parts.enter_context(running())
            self._engine = CodedEngine(server, folder, dtype)
            parts.callback(self._engine.close)
            self._runner = asyncio.Runner()
            self.round(WARM_UP_TOKENS, 2)
            self.close = parts.pop_all().close

    def round(self, tokens: int, max_tokens: int, codec: str = RAW, bytes_per_s: float = 0.0) -> dict[str, Any]:
        """One prompt: computed with nothing to reuse, moved out, and answered again from each tier.

        `bytes_per_s`: the rate of the link to Redis; 0: as much as this machine has.

        By `none`, `device`, `cpu` and `redis`: `ttft_s`, `seconds` until the last token, and the tokens that were
        `reused`; `out`: seconds until the CPU tier and Redis had it; `bytes`: what it takes there.
        """
        return self._runner.run(self._round(prompt(next(SEEDS), tokens), max_tokens, codec, bytes_per_s))

    def blend(self, tokens: int) -> dict[str, float]:
        """Seconds to the first token of a prompt of documents, whole (`none`) and `blended` from host memory."""
        return self._runner.run(self._blend(tokens))

    def fill(self, prompts: int, tokens: int) -> dict[str, int]:
        """Serve prompts, one after the other; returns the bytes in the shared tiers once all is stored."""
        return self._runner.run(self._fill(prompts, tokens))

    def _counted(self, found: Timed) -> dict[str, float]:
        usage = found.usage
        reused = usage["device"] + usage["cpu"] + usage["redis"]
        return {"ttft_s": found.ttft_s, "seconds": found.seconds, "reused": reused}

    async def _round(self, tokens: list[int], max_tokens: int, codec: str, bytes_per_s: float) -> dict[str, Any]:
        engine = self._engine
        engine.link.throttle(0.0)
        if await engine.choose(codec):
            await self._ways(prompt(next(SEEDS), WARM_UP_TOKENS), 1)
            await engine.forget()
        engine.link.throttle(bytes_per_s, LINK_DELAY_S if bytes_per_s else 0.0)
        return await self._ways(tokens, max_tokens)

    async def _ways(self, tokens: list[int], max_tokens: int) -> dict[str, Any]:
        engine = self._engine
        computed, out = await engine.swap_out(tokens, max_tokens)
        found: dict[str, Any] = {"none": self._counted(computed), "out": out, "bytes": engine.tiers.stored_bytes()}
        engine.port.grants = False  # what is measured now is reading
        for source in ("device", "cpu", "redis"):
            if source == "cpu":
                await engine.empty_device()
            elif source == "redis":
                await engine.forget("cpu")
            found[source] = self._counted(await engine.serve([tokens], max_tokens))
            await engine.rest()
        engine.port.grants = True
        return found

    async def _blend(self, tokens: int) -> dict[str, float]:
        engine = self._engine
        await engine.begin(RAW)
        tiers, engine.port = engine.port, MemoryPort()
        try:
            return await self._blended(tokens)
        finally:
            engine.port = tiers

    async def _blended(self, tokens: int) -> dict[str, float]:
        """Documents in another order than they were stored in, and a question."""
        engine = self._engine
        documents = [prompt(next(SEEDS), tokens // DOCUMENTS) for _ in range(DOCUMENTS)]
        for document in documents:
            await timed([engine.generate(document, greedy(1))], 1)
        await asyncio.to_thread(engine.wait_for_saves)
        chunks, asked = [], prompt(next(SEEDS), SYSTEM_TOKENS)
        for document in reversed(documents):
            chunks.append(range(len(asked), len(asked) + len(document)))
            asked = asked + document
        asked += prompt(next(SEEDS), SYSTEM_TOKENS)
        whole = await timed([engine.generate(asked, greedy(1))], 1)
        await asyncio.to_thread(engine.wait_for_saves)
        counters = engine.reuse.paths["blend"].counters
        counters.last = None
        plan = engine.blend_plan(asked, chunks)
        found = await timed([engine.blended(asked, greedy(1), plan)], 1)
        await asyncio.to_thread(engine.wait_for_saves)
        if counters.last is None:
            raise RuntimeError(f"nothing was blended: {dict(counters.outcomes)}")
        return {"none": whole.ttft_s, "blended": found.ttft_s}

    async def _fill(self, prompts: int, tokens: int) -> dict[str, int]:
        await self._engine.choose(RAW)
        for _ in range(prompts):
            await self._engine.swap_out(prompt(next(SEEDS), tokens))
        return self._engine.tiers.stored_bytes()
