"""What an EngineClient is asked that the ingress, which has no engine of its own, has no answer to.

Leans on vLLM: `vllm.engine.protocol.EngineClient`, an ABC; `tests/app/openai/test_vllm_contract.py` fails when it has
another abstract method.
"""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.engine.protocol import EngineClient


async def _lives_on_the_replica(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("the ingress has no engine of its own; this is an operation of a replica's engine")


class EngineElsewhere(EngineClient):
    """Operations of an engine that are none of the ingress's; base of what sends prompts to replicas."""

    async def is_tracing_enabled(self) -> bool:
        """Whether trace headers are passed on; the replicas decide what they do with them."""
        return True

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: clients cannot start KV transfers here."""

    async def do_log_stats(self) -> None:
        """Nothing to do: /metrics shows the figures."""

    encode: Any = _lives_on_the_replica
    start_profile: Any = _lives_on_the_replica
    stop_profile: Any = _lives_on_the_replica
    reset_mm_cache: Any = _lives_on_the_replica
    reset_encoder_cache: Any = _lives_on_the_replica
    reset_prefix_cache: Any = _lives_on_the_replica
    sleep: Any = _lives_on_the_replica
    release_kv_cache_memory: Any = _lives_on_the_replica
    wake_up: Any = _lives_on_the_replica
    is_sleeping: Any = _lives_on_the_replica
    add_lora: Any = _lives_on_the_replica
    pause_generation: Any = _lives_on_the_replica
    resume_generation: Any = _lives_on_the_replica
    is_paused: Any = _lives_on_the_replica
