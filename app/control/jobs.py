"""Long work of the control API: answered 202 with a job, which is then polled.

Invariants: at most `MOST_RUNNING` jobs run, shared fairly among the tenants (`app.gate.fair_shares`); of each tenant
`MOST_KEPT` or, with many tenants, its part of `MOST_KEPT_IN_ALL` are remembered, its oldest ended one is forgotten
first; a tenant sees no other's jobs; every job ends, by its own deadline. Lives in the ingress and ends with it. One
event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from app.gate.errors import OverloadedError
from app.gate.fair_shares import FairShares

logger = logging.getLogger(__name__)

MOST_RUNNING = 64
MOST_KEPT = 1000
MOST_KEPT_IN_ALL = 10_000
Work = Callable[[], Awaitable[dict[str, Any]]]
RUNNING, DONE, FAILED = "running", "done", "failed"


@dataclass(slots=True)
class Job:
    """One piece of work. `result`: how far it is, or what came of it; `message`: why it failed."""

    kind: str
    tenant: str
    job_id: str = field(default_factory=lambda: f"job-{secrets.token_hex(8)}")
    status: str = RUNNING
    result: dict[str, Any] = field(default_factory=dict)
    message: str | None = None

    def report(self) -> dict[str, Any]:
        """The job as the API shows it."""
        return {
            "id": self.job_id,
            "object": "crosskv.job",
            "kind": self.kind,
            "status": self.status,
            "message": self.message,
            **self.result,
        }


class Jobs:
    """See the module's docstring."""

    def __init__(self, tenants: Collection[str] = ()) -> None:
        """`tenants`: all that there are; none means that there is one, without a name."""
        self._running = FairShares(max(MOST_RUNNING, 2 * len(tenants)), tenants)
        self._most_kept = max(1, min(MOST_KEPT, MOST_KEPT_IN_ALL // max(1, len(tenants))))
        self._jobs: dict[str, dict[str, Job]] = {}
        """By tenant and id, oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, kind: str, tenant: str, work: Work, progress: dict[str, Any] | None = None) -> Job:
        """Begin `work`. It answers a dict whose `outcome` is "done" or the reason why not, with a `message` then.

        `progress`: what the job shows until then; `work` may change it.

        Raises:
            OverloadedError: too many jobs run already.
        """
        with self.place(kind, tenant) as begin:
            return begin(work, progress)

    @contextmanager
    def place(self, kind: str, tenant: str) -> Iterator[Callable[[Work, dict[str, Any] | None], Job]]:
        """Hold a job's place for what has to be ordered before the job begins, which it does with what this yields.

        It is called once at most, with the `work` and `progress` of `start`. Raises OverloadedError as that does.
        """
        if not self._running.take(tenant, 1):
            raise OverloadedError("Too many moves are under way. Please try again later.")
        begun: list[Job] = []

        def begin(work: Work, progress: dict[str, Any] | None) -> Job:
            begun.append(self._begin(Job(kind, tenant, result=progress if progress is not None else {}), work))
            return begun[0]

        try:
            yield begin
        finally:
            if not begun:
                self._running.give_back(tenant, 1)

    def _begin(self, job: Job, work: Work) -> Job:
        own = self._jobs.setdefault(job.tenant, {})
        self._forget_ended(own)
        own[job.job_id] = job
        task = asyncio.get_running_loop().create_task(self._run(job, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    def find(self, job_id: str, tenant: str) -> Job | None:
        """A tenant's job by its id; None when there is none (any more)."""
        return self._jobs.get(tenant, {}).get(job_id)

    async def _run(self, job: Job, work: Work) -> None:
        try:
            job.result = await work()
        except Exception:
            logger.warning("%s %s failed", job.kind, job.job_id, exc_info=True)
            job.status, job.message = FAILED, "The KV manager did not answer."
            return
        finally:
            self._running.give_back(job.tenant, 1)
        job.message = job.result.pop("message", None)
        job.status = DONE if job.result.get("outcome") == "done" else FAILED

    def _forget_ended(self, own: dict[str, Job]) -> None:
        for job_id, job in list(own.items()):
            if len(own) < self._most_kept:
                return
            if job.status != RUNNING:
                del own[job_id]
