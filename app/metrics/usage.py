"""`usage.kv_cache` and `usage.prompt_tokens_details.cached_tokens`: where the prompt's KV came from (DESIGN §6).

vLLM's classes build the usage; this adds to it, in the answer object or in the stream's last event.

Leans on vLLM: `UsageInfo` takes extra fields; the usage of a stream with `stream_options.include_usage` is an
event of its own with `"choices":[]`, written without spaces, as the last before `[DONE]`. `tests/app` holds both.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo, UsageInfo
from vllm.outputs import RequestOutput

from app.metrics.stages import RequestStages
from deployments.protocol.wire import KV_CACHE_USAGE, KVCacheUsage
from kvmanager.segments.keys import BLENDED, EXACT, Fidelity

logger = logging.getLogger(__name__)

SOURCES = ("device", "cpu", "redis", "recomputed")
"""Where a prompt token's KV can come from; the first three are reuse."""

_EVENT_PREFIX = "data: "
_USAGE_EVENT_MARK = '"choices":[]'  # cannot occur inside a JSON string: there, its quotes would be escaped


class RequestKVUsage:
    """Adds up what the replicas report for the prompts of one HTTP request."""

    def __init__(self) -> None:
        self._tokens = dict.fromkeys(SOURCES, 0)
        self._blended = 0
        self._replicas: list[str] = []
        self._reasons: list[str] = []
        self.cached_at_first: int | None = None
        """Tokens that the prompt whose first output came last has reused, by then; None: none has come."""
        self.stages: RequestStages | None = None
        """Of the last prompt that ended, for a caller that may see them and asked."""
        self.fidelity: Fidelity = EXACT
        """What the prompts were computed under."""

    def begin(self, usage: KVCacheUsage) -> None:
        """The first output of a prompt has come, with what is known by then."""
        self.cached_at_first = usage["device"] + usage["cpu"] + usage["redis"]

    def add(self, usage: KVCacheUsage) -> None:
        """Count one prompt."""
        self._tokens["device"] += usage["device"]
        self._tokens["cpu"] += usage["cpu"]
        self._tokens["redis"] += usage["redis"]
        self._tokens["recomputed"] += usage["recomputed"]
        self._blended += usage.get("blended", 0)
        if usage["replica"] not in self._replicas:
            self._replicas.append(usage["replica"])
        reason = usage.get("reason", "")
        if reason and reason not in self._reasons:
            self._reasons.append(reason)

    def write_to(self, usage: UsageInfo) -> None:
        """Add our fields to vLLM's usage of the same request. No prompt counted: leaves it as it is."""
        told = self.fields()
        if told is None:
            return
        details = usage.prompt_tokens_details or PromptTokenUsageInfo()
        details.cached_tokens = self.cached_tokens
        usage.prompt_tokens_details = details
        setattr(usage, "kv_cache", told)  # noqa: B010 (an extra field, unknown to the type)

    def write_to_event(self, event: str) -> str:
        """The stream's event with our fields added, if it is the one that carries the request's usage."""
        if _USAGE_EVENT_MARK not in event or not self._replicas:
            return event
        chunk = json.loads(event.removeprefix(_EVENT_PREFIX))
        if not chunk.get("usage"):
            return event
        usage = UsageInfo.model_validate(chunk["usage"])
        self.write_to(usage)
        chunk["usage"] = usage.model_dump(exclude_none=True, exclude_unset=True)
        return f"{_EVENT_PREFIX}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were not computed."""
        return sum(self._tokens[source] for source in SOURCES if source != "recomputed")

    def fields(self) -> dict[str, Any] | None:
        """Our field `kv_cache` of any protocol's usage; None: no prompt was counted."""
        if not self._replicas:
            return None
        return {
            **self._tokens,
            **({"blended": self._blended} if self.fidelity == BLENDED else {}),
            "replica": ",".join(self._replicas),
            "fidelity": self.fidelity,
            **({"reason": ",".join(self._reasons)} if self._reasons else {}),
            **({"stages_ms": self.stages.in_ms()} if self.stages else {}),
        }


def prompt_usage(output: RequestOutput, prompt_tokens: int) -> KVCacheUsage:
    """What the last output of a prompt says about its KV.

    A replica that reports nothing, what does not add up to the prompt, or more blended than loaded, does not cost the
    client its answer: then vLLM's own count is taken, which knows the engine's cache only.
    """
    reported: KVCacheUsage | None = (output.kv_transfer_params or {}).get(KV_CACHE_USAGE)
    if reported is not None:
        counts = (reported["device"], reported["cpu"], reported["redis"], reported["recomputed"])
        blended_fits = 0 <= reported.get("blended", 0) <= reported["cpu"] + reported["redis"]
        if min(counts) >= 0 and sum(counts) == prompt_tokens and blended_fits:
            return reported
        logger.warning("request %s: %s does not add up to %d tokens", output.request_id, reported, prompt_tokens)
    reused = min(output.num_cached_tokens or 0, prompt_tokens)
    return {"device": reused, "cpu": 0, "redis": 0, "recomputed": prompt_tokens - reused, "replica": ""}
