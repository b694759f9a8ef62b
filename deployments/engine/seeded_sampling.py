"""A seeded request's tokens depend on its seed and its prompt, not on the other requests of its steps.

vLLM's model runner samples for every row of a step and throws away what it sampled for rows whose prompt goes on in the
next step. It then turns the row's generator back (`gen.set_offset`), which a CPU generator refuses: one seeded prompt
longer than a step, together with one request that decodes, ends the engine. It also drops the token of a step whose
synchronous load failed, and there turns back nothing.

So a generator is set before each sampling to where its request stands. A row that will be thrown away does not draw
from its generator, and a token that is sampled a second time is drawn from the same state as the first time.

Leans on vLLM, `vllm.v1.worker.gpu_model_runner.GPUModelRunner`: `_sample` is followed by `_bookkeeping_sync` in
the same step, `discard_request_mask.np` marks the rows to throw away, `input_batch.generators` maps a row to its
generator and is the very dict that sampling reads, `requests` has each request's `output_token_ids`.
`Executor.collective_rpc` gives a function each rank's worker, whose runner is at `worker.model_runner`.
`tests/deployments/engine/test_seeded_sampling.py` fails when one of these changes.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import vllm

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from vllm.v1.engine.core import EngineCore

_SAMPLE = ["logits", "spec_decode_metadata"]
_BOOKKEEPING = ["scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens"]


def keep_seeds_exact(core: EngineCore) -> None:
    """Make the engine draw for each seeded request what it draws when the request is alone.

    On the engine thread, before the first step. Every rank samples. Raises RuntimeError for an engine that is made
    otherwise.
    """
    core.model_executor.collective_rpc(_keep_in_rank)


def _keep_in_rank(worker: Any) -> None:
    runner = _part(worker, "worker.model_runner")
    _check(runner)
    seeds = _Seeds(runner)
    sample, bookkeeping = runner._sample, runner._bookkeeping_sync

    def sample_what_counts(*args: Any, **kwargs: Any) -> Any:
        seeds.before_sampling()
        return sample(*args, **kwargs)

    def bookkeeping_without_rewinding(*args: Any, **kwargs: Any) -> Any:
        try:
            return bookkeeping(*args, **kwargs)
        finally:
            seeds.after_bookkeeping()

    runner._sample, runner._bookkeeping_sync = sample_what_counts, bookkeeping_without_rewinding


def model_runner(core: EngineCore) -> Any:
    """vLLM's model runner of an engine of one process. Raises RuntimeError for an engine that is made otherwise."""
    return _part(core, "model_executor.driver_worker.worker.model_runner")


class _Seeds:
    """The generators of the rows under way. Engine thread only."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._withheld: dict[int, Generator] = {}
        # Before a generator's last draw: how many tokens its request had, and the generator's state (5 KB on a CPU).
        self._drawn: WeakKeyDictionary[Generator, tuple[int, Tensor]] = WeakKeyDictionary()

    def before_sampling(self) -> None:
        batch = self._runner.input_batch
        thrown_away = self._runner.discard_request_mask.np
        for row, generator in list(batch.generators.items()):
            if thrown_away[row]:
                self._withheld[row] = batch.generators.pop(row)
                continue
            tokens = len(self._runner.requests[batch.req_ids[row]].output_token_ids)
            last_tokens, state = self._drawn.get(generator, (-1, None))
            if last_tokens == tokens and state is not None:
                generator.set_state(state)
            else:
                self._drawn[generator] = tokens, generator.get_state()

    def after_bookkeeping(self) -> None:
        self._runner.input_batch.generators.update(self._withheld)
        self._withheld.clear()


def _check(runner: Any) -> None:
    for name, expected in (("_sample", _SAMPLE), ("_bookkeeping_sync", _BOOKKEEPING)):
        method = getattr(runner, name, None)
        found = list(inspect.signature(method).parameters) if callable(method) else None
        if found != expected:
            raise RuntimeError(_changed(runner, f"{name}{found or ' is missing'}, expected {name}{expected}"))
    for path in ("discard_request_mask.np", "input_batch.generators", "input_batch.req_ids", "requests"):
        _part(runner, path)


def _part(whole: Any, path: str) -> Any:
    part = whole
    for name in path.split("."):
        part = getattr(part, name, None)
    if part is None:
        raise RuntimeError(_changed(whole, f"{path} is missing"))
    return part


def _changed(whole: Any, what: str) -> str:
    return (
        f"vllm {vllm.__version__}'s {type(whole).__name__} is not the one that crosskv makes safe for seeded requests: "
        f"{what}. Install the vllm that requirements/ pins and leave VLLM_USE_V2_MODEL_RUNNER unset, or change "
        "deployments/engine/seeded_sampling.py to fit: without it a seeded prompt can end the engine."
    )
