"""A prompt that ends whatever engine computes it.

Leans on vLLM: `EngineCore.model_executor.execute_model`, `SchedulerOutput.scheduled_new_reqs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def make_mortal(core: Any, deadly_tokens: Sequence[int]) -> None:
    """Let an engine die of any prompt that contains this run of token ids."""
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
