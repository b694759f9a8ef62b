"""Computes chunks of blended prompts that are not stored yet, each by an exact request of its own (`blending.fill`).

* `idle`: after a blended prompt, its missing chunks wait for idle time; those for which there is no room are dropped.
* `first`: missing chunks are computed before the prompt that brings them, which is sent when they are stored, or when
  that takes too long. Prompts that bring the same chunks wait for the same computation. Where a tenant's prompt was not
  blended afterwards, nothing of that tenant's is computed first for `BACK_OFF_S`, and idle time serves instead.
* `manual`: nothing by itself. An order by hand waits for idle time, whatever the mode.

Nothing here fails a prompt but a chunk of it that has ended an engine: with `first` the prompt is refused as the chunk
is, for it would end the next engine. KV from a prompt where others stood before the chunk is never stored for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.extensions.blend.precompute.chunks import MissingChunk, blend_of, chunks_of
from app.extensions.blend.precompute.turns import InterruptedTooOftenError, PrecomputeTurns
from app.gate.errors import PoisonPromptError, RefusedPromptError
from app.gate.fair_shares import FairShares
from app.gate.observed_prompt import SentPrompt
from app.gate.prompt_extra import SendParts
from app.metrics.labels import FILL_DROPPED, FILL_FAILED, FILL_FILLED, FILL_INTERRUPTED, FILL_REFUSED
from app.openai.prompt_keys import PromptKeys
from app.openai.retries import PromptSender, RetryingStream
from configs.settings import Settings
from deployments.protocol.wire import KV_CACHE_USAGE, NOT_READ, GenerateRequest, KVCacheUsage
from kvmanager.extensions.blend.blend_choice import LEAST_REUSED_TOKENS
from kvmanager.loading.load_choice import LoadMode

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

logger = logging.getLogger(__name__)

MOST_TOKENS = 1 << 19
"""Of all chunks that wait for idle time: about 20 MB of token ids, shared fairly by the tenants."""
MOST_TRIES = 8
"""Times that one chunk is begun in idle time, and interrupted."""
STORED_POLL_S, LONGEST_POLL_S = 0.01, 0.16
"""Pauses between two questions, each twice as long as the one before: a question carries all names of the chunks."""
STORED_WAIT_S, STORED_WAIT_SHARE = 0.25, 0.25
"""How long to wait until chunks are stored: seconds, plus a share of the time that computing them took."""
LOOK_UP_PAUSES_S = (0.25, 0.5, 1.0)
"""Idle work asks again when the manager does not say in time what is stored."""
UNANSWERED_S = 5.0
"""Nothing is computed first for this long after the manager has not said in time what is stored."""
BACK_OFF_S = 60.0
"""How long a tenant's chunks are not computed first where that was in vain, and none where replicas do not blend."""
KNOWN_S = 30.0
"""A chunk that was found, computed or given up is not looked at again for this long."""
MOST_KNOWN = 4096

StoredBlocks = Callable[[Sequence[Sequence[bytes]]], Awaitable[list[int] | None]]
"""How many leading blocks of each sequence are stored; None without an answer in time."""

# What became of a chunk.
FILLED, STORED, NOT_STORED, FAILED, REFUSED, NOT_BLENDED = (
    "filled", "stored", "not_stored", "failed", "refused", "not_blended",
)  # fmt: skip


@dataclass(slots=True)
class _Computing:
    task: asyncio.Task[str]
    waiting: int = 0


def why_off(settings: Settings) -> str | None:
    """Why these settings leave nothing to compute alone, in words; None: they do not."""
    kv = settings.kv
    if not kv.enabled:
        return "Blending is off: no KV is shared (kv.enabled)."
    if LoadMode(kv.load_or_recompute) is LoadMode.RECOMPUTE:
        return "Blending is off: stored KV is never used (kv.load_or_recompute)."
    if not kv.cpu_tier_bytes:
        return "Blending is off: there is no CPU tier to store chunks in (kv.cpu_tier_bytes)."
    return None


def precompute_of(settings: Settings, parts: SendParts) -> Precompute:
    """That of a server with these settings: where nothing would be read, nothing is computed by itself."""
    always = LoadMode(settings.kv.load_or_recompute) is LoadMode.LOAD
    return Precompute(
        "manual" if why_off(settings) else settings.blending.fill,
        parts.sender,
        parts.keys,
        lambda sequences: parts.control.stored_blocks(sequences, settings.kv.plan_deadline_s),
        settings.http.tenants,
        least_tokens=1 if always else LEAST_REUSED_TOKENS,
    )


class _Prompt:
    """What is heard of one prompt."""

    def __init__(self, owner: Precompute, sent: SentPrompt) -> None:
        self._owner = owner
        self._sent = sent
        self._usage: KVCacheUsage | None = None

    def hear(self, output: RequestOutput, replica: str) -> None:
        """See `PromptEar`."""
        del replica
        if output.finished:
            self._usage = (output.kv_transfer_params or {}).get(KV_CACHE_USAGE)

    def end(self, failed: str) -> None:
        """See `PromptEar`."""
        self._owner.ended(self._sent, None if failed else self._usage)


class Precompute:
    """See the module's docstring. A `PromptObserver`; one per ingress."""

    def __init__(
        self,
        mode: str,
        sender: PromptSender,
        keys: PromptKeys,
        stored_blocks: StoredBlocks,
        tenants: Collection[str],
        *,
        least_tokens: int = LEAST_REUSED_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`least_tokens`: prompts with fewer in their chunks are not worth a blend."""
        self._mode = mode
        self._sender = sender
        self._keys = keys
        self._stored_blocks = stored_blocks
        self._count = sender.metrics.count_fill
        self._least_tokens = least_tokens
        self._clock = clock
        self._turns = PrecomputeTurns(lambda: len(sender.replicas.ranks() or ()))
        self._room = FairShares(max(MOST_TOKENS, len(tenants)), tenants)
        """In tokens, of what waits for idle time."""
        self._waiting: set[bytes] = set()
        self._first: dict[bytes, _Computing] = {}
        """What is computed before prompts, by the chunk's key."""
        self._computed_for: set[str] = set()
        """Request ids of prompts for which chunks were computed first."""
        self._known: OrderedDict[bytes, float] = OrderedDict()
        """Chunks, by key, and until when they need not be looked at."""
        self._not_first_before: dict[str, float] = {}
        """Until when nothing is computed first, by tenant."""
        self._unanswered_until = self._off_until = float("-inf")
        self._failed_once = False
        self._tasks: set[asyncio.Task[Any]] = set()
        sender.metrics.show_chunks_waiting(lambda: len(self._waiting))

    @property
    def is_off(self) -> bool:
        """Whether a replica has said a while ago that it does not blend: no prompt would read a chunk."""
        return self._clock() < self._off_until

    def begin(self, prompt: SentPrompt) -> _Prompt:
        """See `PromptObserver`: what idle time was used for ends."""
        self._turns.begins()
        return _Prompt(self, prompt)

    def ended(self, prompt: SentPrompt, usage: KVCacheUsage | None) -> None:
        """A prompt has left; its missing chunks wait for idle time. `usage`: of one that was answered."""
        self._turns.ends()
        request, tenant = prompt.request, prompt.context.tenant
        was_first = request.request_id in self._computed_for
        self._computed_for.discard(request.request_id)
        blend = blend_of(request)
        if usage is None or blend is None or self._mode == "manual":
            return
        if was_first and not usage.get("blended") and blend.recompute_ratio < 1.0:
            self._not_first_before[tenant] = self._clock() + BACK_OFF_S
            logger.info(
                "chunks were computed first and not blended: for %.0f s none of their tenant's is computed first",
                BACK_OFF_S,
            )
        chunks = [chunk for chunk in self._worth(request) if chunk.key not in self._waiting]
        if chunks and not self.is_off:
            own_tokens = usage["device"] + usage["cpu"] + usage["redis"] - usage.get("blended", 0)
            self._await_idle_time(request, chunks, tenant, own_tokens)

    async def before(self, request: GenerateRequest, tenant: str) -> None:
        """Compute a prompt's missing chunks where that comes first. The caller keeps the deadline.

        When the last prompt that waits for a chunk goes away, the chunk is aborted. Raises PoisonPromptError or
        RefusedPromptError for a chunk that has ended an engine.
        """
        if self._mode != "first" or blend_of(request) is None or self._is_back_off(tenant):
            return
        chunks = self._worth(request)
        if not chunks:
            return
        missing = await self._missing(request, chunks)
        if missing is None:
            self._unanswered_until = self._clock() + UNANSWERED_S
        if not missing:
            return
        self._computed_for.add(request.request_id)
        began = self._clock()
        joined = [self._join(chunk) for chunk in missing]
        try:
            await asyncio.wait([computing.task for computing in joined])
        finally:
            for chunk, computing in zip(missing, joined, strict=True):
                self._leave(chunk, computing)
        errors = [computing.task.exception() for computing in joined if not computing.task.cancelled()]
        for error in errors:
            if isinstance(error, (PoisonPromptError, RefusedPromptError)):
                raise error
        await self._until_stored([chunk for chunk in missing if not self._is_known(chunk.key)], self._clock() - began)

    async def order(self, chunk: MissingChunk, tenant: str) -> str:
        """Compute a chunk in idle time, by order of a tenant; return the outcome.

        `FILLED`, `STORED`: it is stored, now or already. `NOT_STORED`: it was computed, and there was no room for it,
        or it was not reported as stored. `FAILED`: it was not computed. `REFUSED`: it may have ended an engine.
        `NOT_BLENDED`: the replica does not blend. Raises what a prompt's error may be, such as UnavailableError.
        """
        if await self._is_stored(chunk):
            self._note(chunk.key)
            return STORED
        began = self._clock()
        try:
            outcome = await self._turns.when_idle(tenant, lambda: self._compute(chunk))
        except (PoisonPromptError, RefusedPromptError):
            return REFUSED
        if outcome != FILLED:
            return outcome
        await self._until_stored([chunk], self._clock() - began)
        return FILLED if await self._is_stored(chunk) else NOT_STORED

    def close(self) -> None:
        """Give up what is under way."""
        for task in (*self._tasks, *(computing.task for computing in self._first.values())):
            task.cancel()

    # What is missing.

    def _is_back_off(self, tenant: str) -> bool:
        now = self._clock()
        return now < max(self._off_until, self._unanswered_until, self._not_first_before.get(tenant, now))

    def _worth(self, request: GenerateRequest) -> list[MissingChunk]:
        """A prompt's chunks that are to be looked at; none where they are not worth a blend."""
        chunks = chunks_of(request)
        if sum(len(chunk.block_hashes) for chunk in chunks) * self._keys.block_size < self._least_tokens:
            return []
        return [chunk for chunk in chunks if not self._is_known(chunk.key)]

    async def _missing(
        self, request: GenerateRequest, chunks: Sequence[MissingChunk], own_tokens: int | None = None
    ) -> list[MissingChunk] | None:
        """Those of a prompt's chunks that are not stored, and not in its own beginning; None without an answer.

        `own_tokens`: how long that is; None: as long as what is stored under the prompt's own names.
        """
        own = [request.block_hashes, request.exact_block_hashes] if own_tokens is None else []
        found = await self._stored_blocks([*own, *(chunk.block_hashes for chunk in chunks)])
        if found is None or len(found) != len(own) + len(chunks):
            return None
        block = self._keys.block_size
        reached = max(found[: len(own)]) * block if own_tokens is None else own_tokens
        blend = blend_of(request)
        assert blend is not None
        ends = {
            place.block_hashes[-1]: place.start_token + place.tokens for place in blend.chunks if place.block_hashes
        }
        missing = []
        for chunk, blocks in zip(chunks, found[len(own) :], strict=True):
            if blocks >= len(chunk.block_hashes):
                self._note(chunk.key)
            # What lies in this prompt's beginning is not stored as a chunk: other prompts may want it.
            elif ends[chunk.key] // block * block > reached:
                missing.append(chunk)
        return missing

    def _is_known(self, key: bytes) -> bool:
        until = self._known.get(key)
        return until is not None and until > self._clock()

    def _note(self, key: bytes) -> None:
        self._known.pop(key, None)
        self._known[key] = self._clock() + KNOWN_S
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    async def _is_stored(self, chunk: MissingChunk) -> bool:
        found = await self._stored_blocks([chunk.block_hashes])
        return found is not None and found[0] >= len(chunk.block_hashes)

    async def _until_stored(self, chunks: Sequence[MissingChunk], took_s: float) -> None:
        """What is saved is found a moment after it was computed. What is not found in time is not tried again soon."""
        deadline = self._clock() + STORED_WAIT_S + STORED_WAIT_SHARE * took_s
        left, pause = list(chunks), STORED_POLL_S
        while left:
            found = await self._stored_blocks([chunk.block_hashes for chunk in left])
            if found is None:
                return
            late = self._clock() >= deadline
            stored = {chunk.key for chunk, blocks in zip(left, found, strict=True) if blocks >= len(chunk.block_hashes)}
            for chunk in left:
                if late or chunk.key in stored:
                    self._note(chunk.key)
            left = [] if late else [chunk for chunk in left if chunk.key not in stored]
            if left:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_S)

    # First.

    def _join(self, chunk: MissingChunk) -> _Computing:
        """The computation of a chunk, which begins unless it is under way."""
        computing = self._first.get(chunk.key)
        if computing is None:
            work = self._turns.at_once(lambda: self._compute(chunk))
            computing = self._first[chunk.key] = _Computing(asyncio.get_running_loop().create_task(work))
        computing.waiting += 1
        return computing

    def _leave(self, chunk: MissingChunk, computing: _Computing) -> None:
        """Wait for a chunk no more; the last one to leave ends its computation."""
        computing.waiting -= 1
        if not computing.waiting:
            computing.task.cancel()
            if self._first.get(chunk.key) is computing:
                del self._first[chunk.key]

    # In idle time.

    def _await_idle_time(
        self, request: GenerateRequest, chunks: Sequence[MissingChunk], tenant: str, own_tokens: int
    ) -> None:
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        if not self._room.take(tenant, tokens):
            self._count(FILL_DROPPED, len(chunks))
            return
        keys = {chunk.key for chunk in chunks}
        self._waiting |= keys

        def left(task: asyncio.Task[None]) -> None:
            self._waiting -= keys
            self._room.give_back(tenant, tokens)
            self._tasks.discard(task)

        work = self._compute_when_idle(request, chunks, tenant, own_tokens)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(left)

    async def _compute_when_idle(
        self, request: GenerateRequest, chunks: Sequence[MissingChunk], tenant: str, own_tokens: int
    ) -> None:
        """Compute what is missing of a prompt that was answered, one chunk after another. Raises CancelledError only.

        By now all of the prompt is stored under its own names, which says nothing of the next prompt with its chunks.
        """
        missing = await self._missing(request, chunks, own_tokens)
        for pause in LOOK_UP_PAUSES_S:
            if missing is not None:
                break
            await asyncio.sleep(pause)
            missing = await self._missing(request, chunks, own_tokens)
        for chunk in missing or ():
            if chunk.key not in self._first and not self._is_known(chunk.key):
                try:
                    await self._turns.when_idle(tenant, functools.partial(self._compute, chunk), MOST_TRIES)
                except InterruptedTooOftenError:
                    self._count(FILL_DROPPED)
                except Exception:
                    logger.debug("a chunk was not computed", exc_info=True)  # it is counted
                self._note(chunk.key)
            self._waiting.discard(chunk.key)

    async def _compute(self, chunk: MissingChunk) -> str:
        """Compute a chunk: `FILLED`, `FAILED` or `NOT_BLENDED`. Counts what becomes of it. Raises as a prompt does."""
        try:
            outcome = await self._send(chunk)
        except asyncio.CancelledError:
            self._count(FILL_INTERRUPTED)
            raise
        except (PoisonPromptError, RefusedPromptError):
            self._count(FILL_REFUSED)
            self._note(chunk.key)
            raise
        except Exception as error:
            if not self._failed_once:
                logger.warning("a chunk could not be computed (counted from now on, logged once)", exc_info=error)
            self._failed_once = True
            self._count(FILL_FAILED)
            self._note(chunk.key)
            raise
        if outcome == NOT_BLENDED:
            self._off_until = self._clock() + BACK_OFF_S
        else:
            self._count(FILL_FILLED if outcome == FILLED else FILL_FAILED)
        if outcome != FILLED:
            self._note(chunk.key)
        return outcome

    async def _send(self, chunk: MissingChunk) -> str:
        name_blocks = functools.partial(self._keys.name_blocks, chunk.cache_salt, None)
        attempts = RetryingStream(self._sender, chunk.request(), time.monotonic(), name_blocks)
        outcome = FAILED
        async with contextlib.aclosing(attempts.outputs()) as outputs:
            async for output in outputs:
                told: Mapping[str, Any] = output.kv_transfer_params or {}
                if NOT_READ in told:
                    outcome = NOT_BLENDED
                elif output.finished and all(answer.finish_reason != "error" for answer in output.outputs):
                    outcome = FILLED
        return outcome
