"""Which requests an engine was working on when it died, so that nobody else is taken for the culprit.

The suspects of a step that died are the requests that it prefilled: what they are is new to the engine, while a request
that has been decoding for a while has shown that it can be computed. Of a step that prefilled nothing all are suspects
that it computed; of one that died before it was planned, or that only waited for loads, all that had not been computed
yet, or else all. Between two steps nobody is a suspect.

Leans on vLLM: `Scheduler.schedule` and `requests`; `SchedulerOutput.num_scheduled_tokens`, `scheduled_new_reqs`,
`scheduled_cached_reqs` with the tokens computed before the step; `Request.num_prompt_tokens`, `num_computed_tokens`;
the form of the engine's request ids (`InputProcessor.assign_request_id`, `ParentRequest`).
`tests/deployments/engine/test_step_witness.py` holds it on a live engine.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

_ENGINE_ID = re.compile(r"(?:\d+_)?(.*)-[0-9a-f]{8}")


class EngineDiedError(EngineDeadError):
    """The engine died with requests in it; says which of them are suspects, by the ids that the ingress gave them.

    Crosses Ray: what it holds is plain.
    """

    def __init__(self, suspects: Collection[str] = ()) -> None:
        super().__init__()
        self.suspects = tuple(suspects)

    def __reduce__(self) -> tuple[type[EngineDiedError], tuple[tuple[str, ...]]]:
        """An exception is otherwise made anew from its message."""
        return EngineDiedError, (self.suspects,)


class StepWitness:
    """Remembers the step under way. `watch` on the engine thread, `suspects` from any once the engine is dead."""

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._step: Any = None
        """vLLM's SchedulerOutput of the step under way; None while it is planned."""
        self._under_way = False

    def watch(self, scheduler: Any) -> None:
        """Note what the scheduler plans from now on. O(1) per step."""
        self._scheduler = scheduler
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._step, self._under_way = None, True
            self._step = schedule(*args, **kwargs)
            return self._step

        scheduler.schedule = watched

    def step_ended(self) -> None:
        """The step has been computed: no request is to blame for what happens before the next one is planned."""
        self._under_way = False

    def suspects(self) -> list[str]:
        """The requests that may have ended the engine, by the ids that they were sent under."""
        return sorted({sender_id(name) for name in self._named()}) if self._under_way else []

    def _named(self) -> list[str]:
        requests, step = dict(self._scheduler.requests), self._step
        if step is None or not step.num_scheduled_tokens:
            fresh = [name for name, request in requests.items() if not request.num_computed_tokens]
            return fresh or list(requests)
        prefilled = [new.req_id for new in step.scheduled_new_reqs]
        running = step.scheduled_cached_reqs
        for name, computed in zip(running.req_ids, running.num_computed_tokens, strict=True):
            if name in requests and computed < requests[name].num_prompt_tokens:
                prefilled.append(name)
        return prefilled or list(step.num_scheduled_tokens)


def sender_id(engine_id: str) -> str:
    """The id that a request was sent under, of the engine's: vLLM adds to it, behind it and, for `n` > 1, before it."""
    made = _ENGINE_ID.fullmatch(engine_id)
    return made.group(1) if made else engine_id
