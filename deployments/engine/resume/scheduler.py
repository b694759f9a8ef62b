"""vLLM's scheduler with an entrance for requests that have answered before.

Such a request enters as *preempted*: its answered tokens are part of it, their KV is loaded, found on the device or
computed as that of a preempted request is, and sampling goes on behind them. A request with a grammar waits for its
compilation first, as every one does, and the grammar is then advanced by what was answered.

The first output of every request says where its prompt's KV came from, not only the last one: of an answer that is
continued elsewhere the last output comes from another engine, which computed something else.

Leans on vLLM: `Scheduler.add_request` before which a `Request` may be changed; `Request.append_output_token_ids`, which
keeps `block_hashes`; `num_preemptions`, which must not be 0 where `num_computed_tokens` may exceed the prompt, and
decides that a loaded request comes back as PREEMPTED; `_handle_blocked_waiting_request`, which lets a request go whose
grammar is compiled; `structured_output_manager.accept_tokens`; `grammar_compile_error_reqs`, which ends requests with
the finish reason "error"; `EngineCoreOutput.prefill_stats`, which only a request's first output has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from deployments.engine.resume.crossing import RESUMED, resumed_tokens
from deployments.protocol.log_lines import names_request

logger = logging.getLogger(__name__)


class ResumingScheduler(Scheduler):
    """See the module's docstring. On the engine thread."""

    enter_runner: Callable[[Request], None] | None = None
    """Makes a continued request known to the model runner; None: nothing can be continued here."""

    @names_request
    def add_request(self, request: Request) -> None:
        """See vLLM's. A continuation that cannot be computed is ended with an error in the next step.

        It must not raise: that would end an engine in a process of its own.
        """
        tokens = resumed_tokens(request.sampling_params)
        if tokens:
            try:
                self._resume(request, tokens)
            except Exception:
                logger.exception("request %s cannot go on here", request.request_id)
                self._refuse(request)
        super().add_request(request)

    def _resume(self, request: Request, tokens: list[int]) -> None:
        if self.enter_runner is None:
            raise ValueError("this engine's model runner takes no continuations")
        if request.resumable or request.mm_features or request.pooling_params is not None:
            raise ValueError("only an answer to a prompt of tokens can be continued")
        if len(tokens) >= request.max_tokens or request.num_prompt_tokens + len(tokens) >= self.max_model_len:
            raise ValueError(f"an answer of {len(tokens)} tokens has ended")
        assert request.sampling_params is not None
        extra_args = request.sampling_params.extra_args or {}
        request.sampling_params.extra_args = {k: v for k, v in extra_args.items() if k != RESUMED} or None
        request.append_output_token_ids(tokens)
        request.num_preemptions = 1
        if request.status == RequestStatus.WAITING:
            request.status = RequestStatus.PREEMPTED
        self.enter_runner(request)

    def _refuse(self, request: Request) -> None:
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self.grammar_compile_error_reqs.add(request.request_id)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if request.request_id in self.grammar_compile_error_reqs:
            return False
        had_no_grammar = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        ready: bool = super()._handle_blocked_waiting_request(request)
        if not (ready and had_no_grammar and request.num_output_tokens):
            return ready
        if not self.structured_output_manager.accept_tokens(request, list(request.output_token_ids)):
            self._refuse(request)
            return False
        request.status = RequestStatus.PREEMPTED
        return True

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's. O(outputs) more."""
        outputs = super().update_from_output(*args, **kwargs)
        usage_so_far = getattr(self.connector, "usage_so_far", None)
        if usage_so_far is not None:
            for of_client in outputs.values():
                for output in of_client.outputs:
                    if output.prefill_stats is not None and output.kv_transfer_params is None:
                        output.kv_transfer_params = usage_so_far(output.request_id)
        return outputs
