"""Types that cross the Serve handle between the ingress and a replica.

The prompt is rendered and tokenized once, in the ingress. What goes down the handle are token ids, their block
hashes (so that the router and the replica need not hash again) and vLLM's own `SamplingParams`. What comes back are
vLLM's own `RequestOutput` objects, without the prompt's token ids: the ingress already has them, and sending them with
every streamed token would cost O(prompt) bytes per token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from kvmanager.routing.roles import Phase
from kvmanager.segments.keys import EXACT, AdapterName, Fidelity

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

KV_CACHE_USAGE = "crosskv"
"""Key of `KVCacheUsage` in `RequestOutput.kv_transfer_params` of a request's last output."""

NOT_READ = "not_read"
"""The same where KV was not precomputed: the replica has no such extension, so no prompt would read it."""

FIRST_USAGE = "crosskv_usage"
"""Attribute of a request's first output: the same `KVCacheUsage`, with what is known by then."""

KEEP_S = 10.0
"""Serve asks a replica for its health every 2 s and replaces it when that fails three times."""


class KVCacheUsage(TypedDict):
    """Where the prompt's KV came from, in tokens; the four counts add up to the prompt's length (DESIGN §6).

    Of a continued request they add up to the tokens that it entered with: `GenerateRequest.num_tokens`.
    """

    device: int
    cpu: int
    redis: int
    recomputed: int
    replica: str
    reason: NotRequired[str]
    """Reason for the amount reused (docs/concepts/loading.md); the replica adds it to what its connector says."""
    blended: NotRequired[int]
    """Of the reused tokens, those that were blended: computed behind other tokens; absent where nothing was."""
    load: NotRequired[tuple[float, float]]
    """When its load began and ended, on the engine's clock (`deployments.protocol.stage_stamps`); absent: no load."""


class FailedReplicas:
    """The replicas that have just failed a request: a dead engine answers at once, and so looks idle to a router.

    Each is remembered for `keep_s` after its last failure. The ingress notes, the router reads, on one event loop.
    Serve replaces a replica that does not recover, under another name.
    """

    def __init__(self, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._failed_at: dict[str, float] = {}

    def note(self, replica: str) -> None:
        """A request failed there because the replica, or its engine, is gone."""
        now = self._clock()
        self._failed_at = {name: at for name, at in self._failed_at.items() if now - at < self._keep_s} | {replica: now}

    def __contains__(self, replica: object) -> bool:
        """Whether it failed a moment ago."""
        at = self._failed_at.get(replica)  # type: ignore[call-overload]  # what is no name was never noted
        return at is not None and self._clock() - at < self._keep_s


@dataclass(slots=True)
class Progress:
    """What the ingress and the router in the same process tell each other about one request; not sent to the replica.

    `on_drain`: to be called when Serve stops the replica while it works on this. `replica`: its unique name, once the
    router has chosen it and it has accepted, which was at `routed` (seconds of `time.monotonic`; 0.0: not yet).
    `failed`: shared by all requests of one ingress.
    """

    first_token: bool = False
    replica: str = ""
    routed: float = 0.0
    failed: FailedReplicas = field(default_factory=FailedReplicas)
    on_drain: Callable[[], None] = lambda: None

    def __reduce__(self) -> tuple[type[Progress], tuple[()]]:
        """Pickle as an empty one: a copy in another process starts over."""
        return Progress, ()


@dataclass(frozen=True, slots=True)
class PinnedCall:
    """An argument that sends a call of any method to one replica: the router reads its unique name here."""

    replica: str


@dataclass(slots=True)
class GenerateRequest:
    """One prompt for one replica.

    `block_hashes` are the hashes of the prompt's full blocks (32 bytes each), computed with `cache_salt`, which
    already contains the model's fingerprint and the tenant (`kvmanager.segments.keys`). `replica_pin` is the replica's
    rank.
    `tenant` is the tenant's tag (`kvmanager.segments.keys.tenant_tag`), empty for none: its quota is charged for what
    is stored.
    `fidelity` is in the salt too. `exact_block_hashes` are those of the same tokens under the salt of exact prompts,
    whose KV every prompt may read; empty for an exact one. `extras`: what extensions bring of it, by their names.
    `priority`: lower goes first, within the limits of its key (`app.gate.auth.Caller`); the engine's scheduler may heed
    it. `predicted_tokens`: how long each answer is expected to be, within what its parameters allow; None: nothing is
    expected. It may be wrong by any factor, so nothing but an order may depend on it. `save_answer`: whether the KV of
    what is sampled is stored; not where a template strips such answers from history. `precomputes`: the extension
    for whose prompts it is computed; it is exact, is stored however short it is, and no client waits for its token.
    `resumed_tokens`: what was sampled of the answer elsewhere and has been sent to the client; not empty for a
    continuation, which goes on behind them as if it had been preempted there. Then the hashes are those of the prompt
    and these tokens together, and only a model with this `fingerprint` may go on.
    `phase`: of a request that prefills here and decodes elsewhere.
    `store_within_s`: one that ends with its first token and goes on elsewhere gives that token at once, and its end
    when its KV is stored, or after that time; 0: as one. `client_request_id`: what the client of its HTTP request is
    told as `x-request-id`, for lines of the log. `adapter`: the LoRA adapter that answers it; None: the model itself.
    `avoid` are unique names of replicas that are not chosen while there are others. `prefer`: the unique name of one
    that is chosen if it can be; empty: none. `waited_s`: since it arrived at the ingress, when it was sent; seconds,
    because clocks differ.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    cache_salt: str
    block_hashes: list[bytes]
    tenant: str = ""
    fidelity: Fidelity = EXACT
    save_answer: bool = True
    exact_block_hashes: list[bytes] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    precomputes: str = ""
    resumed_tokens: list[int] = field(default_factory=list)
    fingerprint: bytes = b""
    priority: int = 0
    predicted_tokens: int | None = None
    replica_pin: int | None = None
    phase: Phase = ""
    store_within_s: float = 0.0
    avoid: tuple[str, ...] = ()
    prefer: str = ""
    waited_s: float = 0.0
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    trace_headers: dict[str, str] = field(default_factory=dict)
    client_request_id: str = ""
    adapter: AdapterName | None = None
    progress: Progress = field(default_factory=Progress)

    @property
    def num_tokens(self) -> int:
        """Tokens that an engine needs KV of before it samples: the prompt, and what was answered before."""
        return len(self.prompt_token_ids) + len(self.resumed_tokens)
