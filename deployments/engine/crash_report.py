"""The requests that an engine was working on when it died, so that no other request is taken for the culprit.

The suspects of a step that died are the requests that it prefilled: what they are is new to the engine, while a request
that has been decoding for a while has shown that it can be computed. Of a step that prefilled nothing all are suspects
that it computed; of one that died before it was planned, or that only waited for loads, all that had not been computed
yet, or else all. Between two steps no request is a suspect.

An engine in a process of its own may end without a word (SIGKILL, a fault of the driver). So its crash report has each
step in memory that the replica shares (`deployments.engine.process.flight_recorder`), where it is planned.

Leans on vLLM: `Scheduler.schedule` and `requests`; `SchedulerOutput.num_scheduled_tokens`,
`total_num_scheduled_tokens`, `scheduled_new_reqs`, `scheduled_cached_reqs` with the tokens computed and answered before
the step; `Request.num_prompt_tokens`, `num_computed_tokens`; the form of the engine's request ids
(`InputProcessor.assign_request_id`, `ParentRequest`). `tests/deployments/engine/test_crash_report.py` holds it on a
live engine.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from deployments.engine.process.flight_recorder import FlightRecorder

_ENGINE_ID = re.compile(r"(?:\d+_)?(.*)-[0-9a-f]{8}")


class EngineDiedError(EngineDeadError):
    """The engine died with requests in it; says which of them are suspects, by the ids that the ingress gave them.

    None: there is no crash report, for its process was ended from outside. Crosses Ray: what it holds is plain.
    """

    def __init__(self, suspects: Collection[str] | None = ()) -> None:
        super().__init__()
        self.suspects = None if suspects is None else tuple(suspects)

    def __reduce__(self) -> tuple[type[EngineDiedError], tuple[tuple[str, ...] | None]]:
        """Keep the suspects: an exception is otherwise rebuilt from its message alone."""
        return EngineDiedError, (self.suspects,)


class CrashReport:
    """Remembers the step under way. `watch` on the engine thread, `suspects` from any once the engine is dead."""

    def __init__(self, recorder: FlightRecorder | None = None) -> None:
        self._recorder = recorder
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
            if self._recorder is not None:
                self._recorder.planning()
            self._step = schedule(*args, **kwargs)
            if self._recorder is not None:
                self._note(self._recorder, self._step)
            return self._step

        scheduler.schedule = watched

    def step_ended(self) -> None:
        """The step has been computed: no request is to blame for what happens before the next one is planned."""
        self._under_way = False
        if self._recorder is not None:
            self._recorder.between_steps()

    def _note(self, recorder: FlightRecorder, step: Any) -> None:
        """Note a step. Few are noted name by name: the decoding requests are mostly those of the step before."""
        tokens, running = step.num_scheduled_tokens, step.scheduled_cached_reqs
        all_decode = not step.scheduled_new_reqs and step.total_num_scheduled_tokens == len(tokens)
        if not tokens:
            recorder.planning()
        elif all_decode and 0 not in running.num_output_tokens:
            recorder.computing(running.req_ids)
        else:
            recorder.computing(self._named())

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
            if name not in requests:
                continue
            # A continued request is prefilled up to the last token that it has answered.
            if computed < requests[name].num_prompt_tokens or step.num_scheduled_tokens[name] > 1:
                prefilled.append(name)
        return prefilled or list(step.num_scheduled_tokens)


def sender_id(engine_id: str) -> str:
    """The id that a request was sent under, of the engine's: vLLM adds to it, behind it and, for `n` > 1, before it."""
    made = _ENGINE_ID.fullmatch(engine_id)
    return made.group(1) if made else engine_id
