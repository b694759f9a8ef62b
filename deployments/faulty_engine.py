"""Fault injection at the engine: a prompt that ends whatever engine computes it.

For tests of a running server (settings section `faults`): it wraps the executor that is shipped, and does nothing else.
Leans on vllm 0.32.0: `EngineCore.model_executor.execute_model`, `SchedulerOutput.scheduled_new_reqs`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from configs.sections import FaultSettings


def make_mortal(core: Any, faults: FaultSettings) -> None:
    """Let the engine die of the prompts that the settings name, if they name any."""
    if not faults.deadly_tokens:
        return
    execute = core.model_executor.execute_model

    def execute_or_die(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        for new in scheduled.scheduled_new_reqs:
            if _contains(new.prompt_token_ids or (), faults.deadly_tokens):
                if faults.deadly_to_process:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("injected: this prompt ends the engine")
        return execute(scheduled, *args, **kwargs)

    core.model_executor.execute_model = execute_or_die


def _contains(tokens: Sequence[int], run: Sequence[int]) -> bool:
    wanted = list(run)
    return any(list(tokens[at : at + len(wanted)]) == wanted for at in range(len(tokens) - len(wanted) + 1))
