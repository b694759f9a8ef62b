"""An engine with KV reuse, a CPU tier and Redis in this process and below it, and what moving a prompt's KV takes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from configs.settings import load_settings
from deployments.redis_tier.server import EmbeddedRedis
from deployments.segment_store.segment_codecs import CACHEGEN, LOSSLESS, RAW_CODING, Coding
from kvmanager.segments.format import RAW
from kvmanager.segments.keys import EXACT, TOLERANT, Fidelity, cache_salt
from load_tests.experiments.engines.limits import STEP_TOKENS
from load_tests.harness.emulated_link import EmulatedLink
from load_tests.harness.engine import PATIENCE_S, SECRET, Timed, prompt
from load_tests.harness.tiered_engine import TieredEngine
from load_tests.harness.tiers import MIB, running

WARM_UP_TOKENS = 512
POLL_S = 0.002
LINK_DELAY_S = 0.0002
"""Of a link whose rate is given: a round trip within a data centre."""
PROBE_S = 15.0
"""Longest wait for a copy to a Redis tier that has just been started."""
CODECS: dict[str, tuple[Coding, Fidelity]] = {
    RAW: (RAW_CODING, EXACT),
    LOSSLESS: (Coding(LOSSLESS, RAW), EXACT),
    "int8": (Coding(RAW, "int8"), TOLERANT),
    CACHEGEN: (Coding(RAW, CACHEGEN, 2), TOLERANT),
}
"""How Redis stores, and the fidelity of the prompts that it stores so: `kv.redis_codec`, `kv.tolerant_codec`."""
SEEDS = itertools.count(1)


class CodedEngine(TieredEngine):
    """A `TieredEngine` whose Redis tier stores with the codec, and whose prompts have the fidelity, that is chosen."""

    def __init__(self, server: EmbeddedRedis, model: str, dtype: str) -> None:
        kv = {"cpu_tier_bytes": 128 * MIB, "redis_bytes": 256 * MIB, "load_or_recompute": "load"}
        engine = {"device_blocks": 512, "max_num_seqs": 16, "max_num_batched_tokens": STEP_TOKENS}
        settings = load_settings({"model": model, "dtype": dtype, "engine": engine, "kv": kv})
        self._folder = tempfile.TemporaryDirectory(prefix="crosskv-")
        self.link = EmulatedLink(control_file=str(Path(self._folder.name) / "link"), shared=True)
        self.link.throttle(0.0)
        super().__init__("experiments", settings, server, link=self.link)
        self._coding = RAW_CODING

    async def choose(self, codec: str) -> bool:
        """Forget everything; from now on Redis stores with `codec` (of `CODECS`), and prompts have its fidelity.

        Returns whether the workers were started anew for it, in which whatever is used first is slow.
        """
        coding, self.fidelity = CODECS[codec]
        self.salt = cache_salt(SECRET, self.fingerprint, "", self.fidelity)
        await self.forget()
        if coding == self._coding:
            return False
        self._coding = coding
        await asyncio.to_thread(self.tiers.restart_redis, coding)
        self.tiers.wait_until_ready(self.keep_alive)
        end = time.monotonic() + PATIENCE_S
        while not await self._stores_with(codec):
            if time.monotonic() > end:
                raise TimeoutError(f"Redis does not store with {codec}")
        return True

    def close(self) -> None:
        """See `TieredEngine.close`."""
        super().close()
        self._folder.cleanup()

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
        end = time.monotonic() + patience_s
        while (await asyncio.to_thread(self.tiers.ask, "lookup", hashes))[tier] < len(hashes):
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
        return codec in known and 0 < stored["redis"] < stored["cpu"]


class TieredHost:
    """The host of a tiered `EngineSpec`. Its methods are called one after the other; each prompt is a new one."""

    def __init__(self, engine: CodedEngine) -> None:
        self._engine = engine
        self._runner = asyncio.Runner()
        self.round(WARM_UP_TOKENS, 2)

    def round(self, tokens: int, max_tokens: int, codec: str = RAW, bytes_per_s: float = 0.0) -> dict[str, Any]:
        """One prompt: computed with nothing to reuse, moved out, and answered again from each tier.

        The link to Redis has so many bytes per second; 0: as many as this machine has.

        By `none`, `device`, `cpu` and `redis`: `ttft_s`, `seconds` until the last token, and the tokens that were
        `reused`; `out`: seconds until the CPU tier and Redis had it; `bytes`: what it takes there.
        """
        return self._runner.run(self._round(prompt(next(SEEDS), tokens), max_tokens, codec, bytes_per_s))

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

    async def _fill(self, prompts: int, tokens: int) -> dict[str, int]:
        await self._engine.choose(RAW)
        for _ in range(prompts):
            await self._engine.swap_out(prompt(next(SEEDS), tokens))
        return self._engine.tiers.stored_bytes()


@contextlib.contextmanager
def tiered_engine(folder: str, dtype: str) -> Iterator[TieredHost]:
    """The engine with all its parts, and their end."""
    with running() as server:
        engine = CodedEngine(server, folder, dtype)
        try:
            yield TieredHost(engine)
        finally:
            engine.close()
