"""A real engine with KV reuse, its index and its tier in this process: no Ray, no HTTP; little else is timed."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from configs.settings import load_settings
from deployments.kv_port import PLAN, LayerArrival, PlanDict, PlannedLoad, SaveGrant
from deployments.layer_groups import in_layer_groups
from deployments.wire import KV_CACHE_USAGE
from kvmanager.config import ManagerConfig
from kvmanager.keys import BlockHash, block_hashes, cache_salt
from kvmanager.load_rates import Sample
from kvmanager.locations import Location, Tier
from kvmanager.manager import KVManager
from kvmanager.segments import SegmentSpan
from kvmanager.server_secret import ServerSecret

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

HERE = Location(Tier.CPU, "node")
REPLICA = "replica"


class BrainPort:
    """A `KVPort` (`deployments.kv_port`) over a manager's brain and a dict, under one lock."""

    def __init__(self, blocks_per_segment: int) -> None:
        self.brain = KVManager(ManagerConfig(blocks_per_segment=blocks_per_segment), epoch=1)
        self.brain.set_budget(HERE, 1 << 40)
        self.lock = threading.Lock()
        self._segments: dict[bytes, bytes] = {}

    def plan(self, hashes: Sequence[BlockHash], used: bool = True) -> PlanDict:
        """What the manager's actor answers; not `used`: what it sends with a promotion."""
        with self.lock:
            ask = self.brain.plan if used else self.brain.reserve
            plan = ask(time.monotonic(), REPLICA, HERE.holder, hashes)
        segments: list[tuple[bytes, int, int, str, str, int, int]] = [
            (s.key, s.start_block, s.num_blocks, "cpu", HERE.holder, s.nbytes, s.nbytes) for s in plan.segments
        ]
        return PlanDict(
            lease_id=plan.lease_id, segments=segments, scores=list(plan.scores), now=plan.now_score, epoch=1
        )

    def lose_all(self) -> None:
        """The tier is emptied."""
        with self.lock:
            self.brain.clear({Tier.CPU})
            self._segments.clear()

    def fetch(self, loads: Sequence[PlannedLoad], deadline: float) -> Iterator[memoryview | None]:
        """See `KVPort`."""
        for load in loads:
            found = self._segments.get(load.key)
            yield memoryview(found) if found is not None else None

    def brings_layers(self, tier: str) -> bool:
        """See `KVPort`."""
        return True

    def fetch_layers(
        self, loads: Sequence[PlannedLoad], group_ends: Sequence[int], deadline: float
    ) -> Iterator[LayerArrival]:
        """See `KVPort`."""
        return in_layer_groups(self.fetch(loads, deadline), group_ends)

    def offer(self, spans: Sequence[SegmentSpan], segment_bytes: Sequence[int]) -> SaveGrant | None:
        """See `KVPort`."""
        with self.lock:
            offer = self.brain.offer(time.monotonic(), REPLICA, HERE, spans, segment_bytes)
        return SaveGrant(offer.save_id, frozenset(offer.keys))

    def store(self, grant: SaveGrant, segments: Sequence[tuple[SegmentSpan, Any]]) -> int:
        """See `KVPort`."""
        with self.lock:
            for span, buffer in segments:
                self._segments[span.key] = buffer.tobytes()
            sizes = [buffer.nbytes for _, buffer in segments]
            return len(self.brain.commit(time.monotonic(), HERE, [span.key for span, _ in segments], sizes))

    def report_bad(self, load: PlannedLoad, reason: str) -> None:
        """See `KVPort`; here it is a bug."""
        raise AssertionError(f"a stored segment is wrong: {reason}")

    def report_rate(self, sample: Sample) -> None:
        """See `KVPort`."""

    def report_placement(self, stored: list[bytes], removed: list[bytes], cleared: bool) -> None:
        """See `KVPort`."""
        with self.lock:
            if cleared:
                self.brain.device_cleared(REPLICA)
            self.brain.device_removed(REPLICA, map(BlockHash, removed))
            self.brain.device_stored(REPLICA, map(BlockHash, stored))

    def release(self, lease_id: int) -> None:
        """See `KVPort`."""
        with self.lock:
            self.brain.release(lease_id)


class DeviceEngine:
    """See the module's docstring. Use on one event loop."""

    def __init__(
        self, model: str, device_blocks: int, segment_tokens: int, port_type: type[BrainPort] = BrainPort
    ) -> None:
        settings = load_settings(
            {
                "model": model,
                "engine": {"device_blocks": device_blocks, "max_num_seqs": 16, "log_stats": False},
                "kv": {"segment_tokens": segment_tokens, "load_deadline_s": 30.0},
            }
        )
        from deployments.engine_args import engine_config, engine_environment

        os.environ.update(engine_environment(settings))
        from deployments.device_orders import DeviceOrders
        from deployments.engine_host import start_engine
        from deployments.kv_reuse import KVReuse
        from deployments.model_identity import model_identity

        self.llm, self.thread = start_engine(engine_config(settings), log_stats=False)
        self.block_size: int = self.llm.vllm_config.cache_config.block_size
        self.port = port_type(segment_tokens // self.block_size)
        fingerprint = model_identity(self.llm.vllm_config, settings).fingerprint()
        self._salt = cache_salt(ServerSecret(bytes(32)), fingerprint, "")
        self.reuse = KVReuse(self.thread, self.llm.vllm_config, settings, self.port, fingerprint, "0")
        self.orders = DeviceOrders(self.reuse.control, self.thread.call)
        self._ids = 0

    def hashes(self, tokens: Sequence[int]) -> list[BlockHash]:
        """The prompt's block hashes."""
        return block_hashes(tokens, self.block_size, self._salt)

    async def stream(self, tokens: Sequence[int], max_tokens: int) -> AsyncIterator[RequestOutput]:
        """vLLM's outputs for a prompt, planned by the brain."""
        from vllm import SamplingParams

        self._ids += 1
        plan = self.port.plan(self.hashes(tokens))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        params.extra_args = {"kv_transfer_params": {PLAN: plan}}
        request: Any = {"type": "token", "prompt_token_ids": list(tokens), "cache_salt": self._salt}
        async for output in self.llm.generate(request, params, f"request-{self._ids}"):
            yield output

    async def device_tokens(self, tokens: Sequence[int]) -> int:
        """Ask for a short answer; returns how many of the prompt's tokens the device still had."""
        usage: Any = {}
        async for output in self.stream(tokens, 1):
            usage = (output.kv_transfer_params or {}).get(KV_CACHE_USAGE, usage)
        return int(usage["device"])

    async def clear(self) -> None:
        """Empty the device and the tier."""
        self.port.lose_all()
        await asyncio.wrap_future(self.reuse.clear_device())

    def close(self) -> None:
        """End the engine."""
        self.orders.close()
        self.reuse.close()
        self.llm.shutdown()
