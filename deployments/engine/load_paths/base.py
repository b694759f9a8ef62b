"""The interface of a load path: one way for KV to come into a request's blocks.

`deployments.engine.scheduler_side` asks its paths in order, and knows none of them by name. A path that has nothing for
a request says so, and the next one is asked. The life of a request, as a path hears of it:

    entered → propose, as often as vLLM asks → admitted → start → ended → advanced, once a step → left

* `propose` may be called many times, and changes nothing that another answer could not change back: vLLM acts on the
  last answer before it gives the request blocks.
* `start` belongs to the path whose proposal vLLM acted on, and to no other.
* `admitted`, `advanced` and `left` come only while the path keeps a state of the request in `TrackedRequest.state`,
  under itself. So a request that needs nothing special costs a path nothing in a step.
* After a preemption a request is asked for again, with its answer counted in, and `admitted` a second time.

Everything runs on the engine thread, between two steps or while one is planned. What raises there ends the engine: a
path catches what it can go on without, and the tokens are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from deployments.engine.tracked_request import TrackedRequest
    from deployments.protocol.engine_hints import EngineHints


class NotYet(Enum):
    """What a path says instead of a proposal."""

    WAIT = "wait"
    """It has something, but not yet: vLLM asks again in its next step, and the request holds no blocks until then."""


WAIT: Final = NotYet.WAIT


@dataclass(frozen=True, slots=True)
class Proposal:
    """A load that a path would start. A path that needs more than this when it starts has a subclass."""

    path: LoadPath
    end_block: int
    """The block of the sequence up to which it brings KV. The request's `first_block`: nothing, and no path behind this
    one is asked."""
    is_async: bool = True
    """Whether the request waits outside the engine's steps; False: the next step waits for the load."""
    boundary_block: int = 0
    """Where vLLM is to keep what windows and states are there; of states it ends a step there. 0: where vLLM says."""


Ask: TypeAlias = Proposal | Literal[NotYet.WAIT] | None


class LoadPath:
    """See the module's docstring. Blocks are numbered in the request's sequence."""

    terms: Any = None
    """What plans must say for this path, told to the manager; None: nothing, or the path is not available."""
    needs_state: bool = False
    """Whether it has nothing to propose for a request of which it keeps no state: then it is not asked."""

    def entered(self, request: TrackedRequest, hints: EngineHints) -> None:
        """Look at a request that enters. `hints`: what came with it, its plan too."""

    def propose(self, request: TrackedRequest, first_block: int) -> Ask:
        """Return what would bring blocks from `first_block` on; None: nothing, the next path is asked."""
        return None

    def admitted(self, request: TrackedRequest) -> None:
        """The request has been given blocks, with a load or without one."""

    def start(
        self,
        request: TrackedRequest,
        block_ids: Sequence[int],
        proposal: Proposal,
        ended: Callable[[TrackedRequest, int], None],
    ) -> None:
        """Bring the blocks from `request.device_tokens` up to `request.loading_upto_tokens`.

        `block_ids`: the request's device blocks, from block 0 on. An asynchronous load ends in
        `KVTransfer.take_finished_loads`. A synchronous one calls `ended` when the step has been computed, with the
        number of leading tokens that are there.
        """
        raise NotImplementedError(f"{type(self).__name__} has proposed nothing")

    def ended(self, request: TrackedRequest, tokens: int) -> None:
        """The load that this path started has ended: the first `tokens` tokens are there."""

    def advanced(self, request: TrackedRequest) -> None:
        """The request runs, and the engine has computed another step."""

    def left(self, request: TrackedRequest) -> None:
        """The request has ended; its blocks are still its own, unless its load is under way."""

    def families(self) -> Iterable[Metric]:
        """Return what is counted here. From any thread, without a lock of the engine's."""
        return ()
