"""Causes faults where a replica's engine computes: in the replica itself, or in a process of the engine's own.

For `load_tests.faults.inside`, in the replica. The engine's process has no door for this: what is sent through the one
for directives carries out the fault while it is unpickled. Leans on vLLM: `EngineCore.step_fn`,
`EngineCore.model_executor.execute_model`, `SchedulerOutput.scheduled_new_reqs`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from deployments.protocol.manager_client import ManagerClient
from kvmanager.moves.directives import DirectiveOrder, Offload
from load_tests.faults.lost_answers import lose_answers

PATIENCE_S = 30.0
_NO_ORDER = DirectiveOrder(0, Offload(()), 0.0)
"""A directive that does nothing."""


def in_engine(handle: Any, fault: Callable[..., None], *arguments: Any) -> None:
    """Call `fault(core, port, *arguments)` with vLLM's engine core and its connector's port, in their process.

    On the loop of a replica whose engine is a process it does not wait for that: ask `is_carried_out`.
    """
    engine = handle._engine
    if not is_process(handle):
        fault(engine.core, handle._port, *arguments)
        return
    asked = engine.asker.ask("carry_out", _Smuggled(fault, arguments))
    loop = engine.asker._reading.get_loop()
    carried_out = asyncio.run_coroutine_threadsafe(asked, loop)
    if asyncio._get_running_loop() is loop:
        handle._carried_out = carried_out
    else:
        carried_out.result(PATIENCE_S)


def is_carried_out(handle: Any) -> bool:
    """Whether the last fault that the replica's own loop has ordered is in the engine; raises why it is not."""
    carried_out = getattr(handle, "_carried_out", None)
    if carried_out is None or not carried_out.done():
        return carried_out is None
    carried_out.result()
    return True


def is_process(handle: Any) -> bool:
    """Whether the engine has a process of its own."""
    return hasattr(handle._engine, "asker")


class _Smuggled:
    def __init__(self, fault: Callable[..., None], arguments: Sequence[Any]) -> None:
        self._sent = fault, arguments

    def __reduce__(self) -> Any:
        return _act, self._sent


def _act(fault: Callable[..., None], arguments: Sequence[Any]) -> DirectiveOrder:
    """In the engine's process, on the thread that answers the replica."""
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "crosskv-answers"]
    core = thread._target.__self__  # type: ignore[attr-defined]
    core.call(lambda: fault(core, core._service._port, *arguments)).result(PATIENCE_S)
    return _NO_ORDER


def break_step(core: Any, port: Any) -> None:
    """The engine raises in its next step."""

    def fail() -> None:
        raise RuntimeError("injected: the engine fails")

    core.step_fn = fail


def hang_step(core: Any, port: Any) -> None:
    """It hangs in its next step, and never comes back."""

    def hang() -> None:
        while True:
            time.sleep(1.0)

    core.step_fn = hang


def die_of(core: Any, port: Any, deadly_tokens: Sequence[int]) -> None:
    """It ends with any prompt that holds this run of token ids."""
    execute = core.model_executor.execute_model

    def execute_or_die(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for new in scheduled.scheduled_new_reqs:
            if _contains(new.prompt_token_ids or (), deadly_tokens):
                raise RuntimeError("injected: this prompt ends the engine")
        return execute(scheduled, *args, **kwargs)

    core.model_executor.execute_model = execute_or_die


def _contains(tokens: Sequence[int], run: Sequence[int]) -> bool:
    wanted = list(run)
    return any(list(tokens[at : at + len(wanted)]) == wanted for at in range(len(tokens) - len(wanted) + 1))


def lose_port_answers(core: Any, port: Any, application: str, share: float) -> None:
    """The port hears this share (0..1) less of the manager's answers, which acts upon what it was asked."""
    port.manager = ManagerClient(application)
    lose_answers(port.manager, share)
