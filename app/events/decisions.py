"""What a prompt says of where it was sent and why, as soon as it is known: with its first output.

Later outputs tell only that it has gone on at another replica. At the prompt's end its tokens are counted in what was
saved. Nothing here raises into an answer's way, and nothing is remembered of a prompt but what its task holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from app.events.savings import AllSavings
from app.events.watchers import Watchers
from app.metrics.usage import SOURCES, prompt_usage
from deployments.protocol.wire import FIRST_USAGE, KV_CACHE_USAGE, KVCacheUsage

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from app.gate.observed_prompt import SentPrompt


class Decisions:
    """One per ingress."""

    def __init__(self, rank_of: Callable[[str], int | None] = lambda replica: None) -> None:
        """`rank_of`: from a replica's unique name to its number."""
        self.watchers = Watchers()
        self.savings = AllSavings()
        self.rank_of = rank_of

    def begin(self, prompt: SentPrompt) -> Decision:
        """Return what will tell of a prompt."""
        return Decision(self, prompt)


class Decision:
    """Of one prompt. `hear` is called with each output, before anything is taken out of it."""

    def __init__(self, all_of_them: Decisions, prompt: SentPrompt) -> None:
        self._all = all_of_them
        self._request = prompt.request
        self._tenant = prompt.context.tenant
        self._answer_id = prompt.answer_id
        self._stages = prompt.stages
        self._replica = ""
        self._usage: KVCacheUsage | None = None

    def end(self, failed: str) -> None:
        """Nothing: what was to be told has been."""

    def hear(self, output: RequestOutput, replica: str) -> None:
        """An output has come from this replica (its unique name)."""
        if output.finished:
            usage = prompt_usage(output, len(self._request.prompt_token_ids))
            self._all.savings.count(self._tenant, usage)
            if self._usage is None:
                self._tell(replica, usage)
                return
        if self._usage is None:
            # A first output has both; of these the replica has signed the former, with its reason.
            usage_so_far = getattr(output, FIRST_USAGE, None) or (output.kv_transfer_params or {}).get(KV_CACHE_USAGE)
            if usage_so_far is not None:
                self._tell(replica, usage_so_far)
        elif replica != self._replica:
            self._tell(replica, None)

    def _tell(self, replica: str, usage: KVCacheUsage | None) -> None:
        """`usage` None: it goes on at another replica, with what it had."""
        moved, self._replica = usage is None, replica
        self._usage = usage or self._usage
        if not len(self._all.watchers) or self._usage is None:
            return
        request, rank = self._request, self._all.rank_of(replica)
        said: dict[str, Any] = {
            "id": request.request_id,
            "answer_id": self._answer_id,
            "replica": str(rank) if rank is not None else self._usage["replica"] or None,
            "reason": "moved" if moved else self._usage.get("reason"),
            "tokens": None if moved else _tokens(self._usage),
            "prompt_tokens": len(request.prompt_token_ids),
            "fidelity": request.fidelity,
            "seconds": round(time.monotonic() - self._stages.lapped, 4),
        }
        self._all.watchers.tell(self._tenant, "route", said, {"tenant": self._tenant})


def _tokens(usage: KVCacheUsage) -> dict[str, int]:
    found = {source: int(usage[source]) for source in SOURCES}  # type: ignore[literal-required]
    return {**found, "blended": int(usage.get("blended", 0))}
