"""Surroundings of vLLM's engine in any process that it runs in: the replica's, or one of its own.

Leans on vLLM: where it scans modules for kernels as its CPU worker starts (`tolerant_module_scan`), and where layers of
Mamba 2 say which states they give (`no_states_inside_a_step`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from vllm.platforms import current_platform

IDLE_STEP_EVERY_S = 0.005
"""While the only requests wait for an asynchronous load the step does nothing: leave the core, and Python's lock, to
the loading thread, which wakes the engine (`wake`)."""


def prepare_process() -> None:
    """Call before the engine is built."""
    # The root of all block hashes must be the same everywhere (kvmanager.segments.keys); vLLM would take it from this
    # variable.
    os.environ.pop("PYTHONHASHSEED", None)
    if torch.cpu._is_amx_tile_supported():
        # Linux gives a process the tile registers when it asks. vLLM's attention uses them unasked: where oneDNN had
        # not asked before (`load_format: dummy`), the first prompt ended the process by an illegal instruction.
        torch.cpu._init_amx()
    no_states_inside_a_step()


def no_states_inside_a_step() -> None:
    """Let vLLM's CPU worker compute Mamba 2 with a prefix cache: states are then kept at the ends of steps alone.

    Of layers of Mamba 2 vLLM also wants the state at one place inside a step. Its kernel for CPUs gives only the last
    one, so the first prompt of more than a block would end the engine (IndexError, vLLM's `MambaMixer2`). Where a
    layer does not offer such states, vLLM ends a step at that place.
    """
    if current_platform.is_cpu():
        from vllm.model_executor.layers.mamba.abstract import MambaBase
        from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

        MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec  # type: ignore[method-assign]


def tolerant_module_scan() -> contextlib.AbstractContextManager[Any]:
    """Let vLLM's CPU worker start although llvmlite is loaded (by numba, by our copy kernels).

    `vllm.triton_utils.dispatcher._rebind_kernels` takes `vars()` of whatever any module holds; llvmlite's library
    wrapper answers `__dict__` with a C function.
    """

    def vars_of(value: Any) -> Any:
        found = vars(value)
        return found if isinstance(found, Mapping) else {}

    return mock.patch("vllm.triton_utils.dispatcher.vars", vars_of, create=True)
