"""Carries answered tokens into the engine, with vLLM's sampling parameters, which cross to an engine's own process.

A client cannot set them: the ingress refuses `extra_args` of this project's (`app.openai.engine_client`), and the
engine's handle writes over what is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

RESUMED = "crosskv_resumed_tokens"
"""Key of `SamplingParams.extra_args`."""


def with_resumed(extra_args: Mapping[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
    """`extra_args` of a request that has answered `tokens`, and of one that has answered nothing."""
    kept = {name: value for name, value in extra_args.items() if name != RESUMED}
    return {**kept, RESUMED: list(tokens)} if tokens else kept


def resumed_tokens(params: SamplingParams | None) -> list[int]:
    """Return the tokens that the request has answered before; empty for a new one."""
    extra_args = params.extra_args if params is not None else None
    return list(extra_args[RESUMED]) if extra_args and RESUMED in extra_args else []
