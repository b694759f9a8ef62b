"""vLLM's EngineClient over the replicas: its serving classes call this as if it were an engine.

Leans on vLLM:

* `vllm.engine.protocol.EngineClient`, an ABC, of which the serving classes use configs, renderer, input processor,
  `errored` / `dead_error`, `check_admission` and `generate`; `app.backend.engine_elsewhere` has the rest;
* `generate` is called, but not awaited, before a response starts: what it raises itself becomes the response's status;
* `InputProcessor.process_inputs`, with which the engine itself will check the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.renderers import BaseRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

from app.answers.lengths import ExpectedLengths
from app.answers.returns import Returns
from app.backend.engine_elsewhere import EngineElsewhere
from app.backend.replica_errors import translate
from app.continuation.live import LiveRequest, LiveRequests, answer_id
from app.gate.admission import AdmissionQueue
from app.gate.errors import UnavailableError
from app.gate.observed_prompt import Kind, PromptEar, PromptObserver, SentPrompt
from app.gate.prompt_extra import Preparation, PromptExtra
from app.gate.request_context import PIN_HEADER, RequestContext, current_request
from app.gate.request_id import LONGEST_ECHOED, for_names
from app.metrics.ingress import IngressMetrics
from app.metrics.stages import ANSWER, RequestStages
from app.metrics.usage import prompt_usage
from app.openai.chat_renderer import OFFERS_TOOLS
from app.openai.constraint_pool import ConstraintPool
from app.openai.large_answers import bound_logprobs
from app.openai.prompt_keys import PromptKeys
from app.openai.retries import NameBlocks, PromptSender, RetryingStream
from app.openai.vocabulary.rows import refuse_without_rows
from deployments.protocol.log_lines import REQUEST_ID
from deployments.protocol.wire import FIRST_USAGE, KV_CACHE_USAGE, GenerateRequest, KVCacheUsage
from kvmanager.segments.keys import EXACT

_MOST_ANSWERS = 128  # OpenAI's own limit on `n`
_NOT_FOR_CLIENTS = ("kv_transfer_params", "ec_transfer_params")


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """What checks requests as an engine would: vLLM's renderer, and what tries constraints."""

    vllm_config: VllmConfig
    renderer: BaseRenderer
    constraints: ConstraintPool


@dataclass(frozen=True, slots=True)
class PromptKV:
    """What says under which names a prompt's KV lies, and what of it is wanted."""

    keys: PromptKeys
    returns: Returns
    """Which answers are worth storing."""
    extras: Mapping[str, PromptExtra]
    """What prompts bring for extensions, by their names."""


@dataclass(frozen=True, slots=True)
class PromptTurns:
    """What says when a prompt is sent: the queue, and how much work is expected of each."""

    queue: AdmissionQueue
    lengths: ExpectedLengths
    preparations: Sequence[Preparation]
    """What is done for a prompt of a tenant when its turn has come, before it is sent."""


class HandleEngineClient(EngineElsewhere):
    """Sends tokenized prompts down a handle and yields what comes back. One per ingress, on its event loop."""

    def __init__(
        self,
        front: FrontEnd,
        kv: PromptKV,
        turns: PromptTurns,
        sender: PromptSender,
        metrics: IngressMetrics,
        observers: Sequence[PromptObserver],
    ) -> None:
        """`observers` hear of each prompt, in their order."""
        self.vllm_config = front.vllm_config
        self.model_config = front.vllm_config.model_config
        self.renderer = front.renderer
        self.input_processor = InputProcessor(front.vllm_config, front.renderer)
        self.keys, self.extras, self._returns = kv.keys, kv.extras, kv.returns
        self.sender, self.metrics = sender, metrics
        self.live = LiveRequests()
        self._constraints = front.constraints
        self._turns = turns
        self._replicas = sender.replicas
        self._observers = observers
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def errored(self) -> bool:
        """Whether a request sent now would find no replica."""
        return self._replicas.none_left()

    @property
    def dead_error(self) -> BaseException:
        """What vLLM's classes raise when `errored`."""
        return UnavailableError()

    is_running = property(lambda self: not self.errored)
    is_stopped = property(lambda self: self.errored)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Hold room in the queue for a prompt with `n` answers; called once per HTTP request, before it is rendered."""
        if n > _MOST_ANSWERS:
            raise VLLMValidationError(f"n must be at most {_MOST_ANSWERS}, got {n}.", parameter="n")
        current_request().ticket.admit(max(n, 1))

    def generate(  # type: ignore[override]  # of the forms of `prompt`, the serving classes send a rendered one only
        self,
        prompt: dict[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Check a rendered prompt now, and return what will send it to a replica and yield the outputs.

        Raises, before anything is sent:
            VLLMValidationError: the engine would refuse the prompt or the parameters (400).
            OverloadedError: a further prompt of the same HTTP request finds no room (429).
        """
        context = current_request()
        _refuse_what_does_not_cross(prompt, sampling_params)
        model = lora_request.lora_name if lora_request is not None else None
        adapter = self.keys.adapter(model)
        if lora_request is not None and adapter is None:
            raise VLLMValidationError("This server does not serve this adapter.", parameter="model")
        self._check(prompt, sampling_params)
        prompt_tokens = len(prompt["prompt_token_ids"])
        bound_logprobs(context, sampling_params, prompt_tokens)
        context.prompts += 1
        if context.prompts > 1:  # the first one's room was taken by check_admission
            context.ticket.admit(sampling_params.n)
        self._check_pin(context)
        expected = functools.partial(
            self._turns.lengths.by_prompt_length, context.tenant, prompt_tokens, sampling_params
        )
        context.reserve(prompt_tokens, sampling_params.max_tokens or 0, sampling_params.n, expected)
        stages = context.stages.copy()
        stages.lap("check")
        fidelity = self.keys.fidelity.of(context.tenant, context.kv_cache)
        salt = self.keys.salt(context.tenant, prompt.get("cache_salt"), context.kv_cache, model)
        token_ids = list(prompt["prompt_token_ids"])
        context.kv_usage.fidelity = fidelity
        kind = None  # what is no chat has no turns
        if OFFERS_TOOLS in prompt:
            kind = Kind(context.tenant, thinks=reasoning_ended is False, tools=prompt[OFFERS_TOOLS])
        saves = self._returns.worth_saving(kind)
        if not saves:
            self.metrics.unsaved_answers.inc(sampling_params.n)
        echoed = request_id[:LONGEST_ECHOED]
        request = GenerateRequest(
            request_id=f"{for_names(echoed)}-{uuid.uuid4().hex}",  # clients may repeat theirs
            prompt_token_ids=token_ids,
            sampling_params=sampling_params,
            cache_salt=salt,
            block_hashes=[],  # `_name_blocks`
            tenant=self.keys.tag(context.tenant),
            fidelity=fidelity,
            save_answer=saves,
            fingerprint=self.keys.fingerprint,
            adapter=adapter,
            priority=context.caller.priority(priority),
            replica_pin=context.replica_pin,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
            trace_headers=dict(trace_headers or {}),
            client_request_id=REQUEST_ID.get(),
        )
        told_id = context.name_answer(answer_id(echoed))
        return self._outputs(SentPrompt(request, context, stages, told_id, kind), prompt)

    async def _outputs(self, sent: SentPrompt, prompt: dict[str, Any]) -> AsyncGenerator[RequestOutput, None]:
        """Wait for a turn, send the request, and yield what a local engine would have yielded."""
        request, context, stages = sent.request, sent.context, sent.stages
        request_id, params = request.request_id, request.sampling_params
        first_at, failed = 0.0, "aborted"
        ears: list[PromptEar] = [ear for observer in self._observers if (ear := observer.begin(sent))]
        try:
            async with contextlib.AsyncExitStack() as stack:
                await context.next_prompt()
                queued = time.monotonic()
                name_blocks = await self._name_blocks(request, prompt, context)
                stages.lap("hash")
                expected = self._turns.lengths.of(context.tenant, request)
                request.predicted_tokens = expected.tokens
                async with asyncio.timeout_at(context.next_deadline()):
                    turn = self._turns.queue.turn(context.tenant, params.n, expected.work)
                    expected.bill = await stack.enter_async_context(turn)
                    for preparation in self._turns.preparations:
                        await preparation.before(request, context.tenant)
                stages.lap("turn")
                attempts = RetryingStream(self.sender, request, queued, name_blocks)
                stack.callback(lambda: expected.left() if attempts.replica else None)
                prompt_tokens = len(request.prompt_token_ids)
                stack.callback(
                    self.live.add(LiveRequest(request_id, sent.answer_id, context.tenant, prompt_tokens, attempts))
                )
                if context.spend is not None:
                    context.spend.use(prompt_tokens)
                self.metrics.queue_time.observe(time.monotonic() - queued)
                context.live[request_id] = lambda: self._abort_soon(attempts.request_id)
                stack.callback(self._abort_if_live, request_id, context)
                outputs = attempts.outputs()
                stack.push_async_callback(outputs.aclose)
                while True:
                    async with asyncio.timeout_at(context.next_deadline()):
                        output = await anext(outputs, None)
                    if output is None:
                        break
                    if not first_at:
                        first_at = time.monotonic()
                        first_usage = getattr(output, FIRST_USAGE, None)
                        context.kv_usage.begin(first_usage or prompt_usage(output, prompt_tokens))
                        if params.output_kind == RequestOutputKind.DELTA:
                            self.metrics.time_to_first_token.observe(first_at - context.arrived)
                            context.first_event_sent = functools.partial(self._count_first_event, stages, first_at)
                    if output.finished:
                        self._count_stages(output, stages, attempts.routed, first_at, context)
                    expected.hear(output, attempts.replica)
                    for ear in ears:
                        ear.hear(output, attempts.replica)
                    stages.usage = self._complete(output, request, prompt, context)
                    if output.finished:
                        failed = ""  # here: the caller may not ask for more
                    yield output
                    if output.finished:
                        break
                if request_id in context.live:
                    raise RuntimeError("the replica ended its outputs before the request was finished")
        except Exception as error:
            translated = translate(error, request_id)
            failed = type(translated).__name__
            raise translated from None
        finally:
            for ear in ears:
                ear.end(failed)

    def _count_stages(
        self, output: RequestOutput, stages: RequestStages, routed: float, first_at: float, context: RequestContext
    ) -> None:
        stages.replied(output, routed, first_at)
        self.metrics.count_stages({name: spent for name, spent in stages.seconds.items() if name != ANSWER})
        if context.shows_stages:
            context.kv_usage.stages = stages

    def _count_first_event(self, stages: RequestStages, first_at: float) -> None:
        """The client has been sent the first event; which may be after the last output has come, or long before."""
        stages.seconds[ANSWER] = seconds = time.monotonic() - first_at
        self.metrics.count_stages({ANSWER: seconds})

    async def _name_blocks(
        self, request: GenerateRequest, prompt: dict[str, Any], context: RequestContext
    ) -> NameBlocks:
        """Hash the prompt's blocks, of a long one on a thread, and find what it brings for extensions.

        Returns what names the blocks of a longer one.
        """
        model, user_salt = request.adapter.name if request.adapter else None, prompt.get("cache_salt")
        exact_salt = None if request.fidelity == EXACT else self.keys.exact_salt(context.tenant, user_salt, model)
        salts = request.cache_salt, exact_salt
        name_blocks = functools.partial(self.keys.name_blocks, *salts, model=model)
        request.block_hashes, request.exact_block_hashes = await name_blocks(request.prompt_token_ids)
        for name, extra in self.extras.items():
            if (found := await extra.of(request, user_salt, context)) is not None:
                request.extras[name] = found
        return name_blocks

    def _complete(
        self, output: RequestOutput, request: GenerateRequest, prompt: dict[str, Any], context: RequestContext
    ) -> KVCacheUsage | None:
        """Put back what did not cross the wire, and take out what is ours: where the KV came from, of the last output.

        Raises what the engine means by the finish reason "error", which vLLM's classes would answer with a 500.
        """
        if any(completion.finish_reason == "error" for completion in output.outputs):
            if request.sampling_params.structured_outputs is not None:
                raise VLLMValidationError("The engine cannot follow the request's structured output constraint.")
            raise UnavailableError("The engine gave this request up. Please try again.")
        output.prompt_token_ids = request.prompt_token_ids
        output.prompt = prompt.get("prompt")
        generated = sum(len(completion.token_ids) for completion in output.outputs)
        self.metrics.generated_tokens.inc(generated)
        if context.spend is not None:
            context.spend.use(generated)
        usage = None
        if output.finished:
            context.live.pop(request.request_id, None)
            usage = prompt_usage(output, len(request.prompt_token_ids))
            context.kv_usage.add(usage)
            self.metrics.count_prompt(usage)
        output.kv_transfer_params = None  # vLLM would show it to the client
        return usage

    async def check_constraint(self, constraint: StructuredOutputsParams | None) -> None:
        """Raise what the engine would raise for this constraint, or would be held up by
        (`app.openai.constraint_pool`)."""
        if constraint is not None:
            context = current_request()
            try:
                async with asyncio.timeout_at(context.deadline):
                    await self._constraints.check(constraint, context.tenant)
            except TimeoutError:
                raise UnavailableError("The request took too long and was ended. Please try again later.") from None

    def _check(self, prompt: dict[str, Any], params: SamplingParams) -> None:
        """Raise what the engine would raise for this prompt, or would end by; not for its constraint."""
        others = copy.copy(params)
        others.structured_outputs = None
        request = self.input_processor.process_inputs("check", prompt, others, supported_tasks=("generate",))  # type: ignore[arg-type]
        refuse_without_rows(request, self.model_config.get_vocab_size())

    def _check_pin(self, context: RequestContext) -> None:
        pin, ranks = context.replica_pin, self._replicas.ranks()
        if pin is None or ranks is None or pin in ranks:
            return
        if pin < self.sender.most_retries:
            raise UnavailableError(
                f"Replica {pin} is not running now. Please try again later, or without {PIN_HEADER}."
            )
        raise VLLMValidationError(f"There is no replica {pin}; there are {sorted(ranks)}.")

    def _abort_if_live(self, request_id: str, context: RequestContext) -> None:
        abort = context.live.pop(request_id, None)
        if abort is not None:
            abort()

    def _abort_soon(self, request_id: str) -> None:
        self.metrics.aborted.inc()
        task = asyncio.get_running_loop().create_task(self.abort(request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Tell the replicas to end these requests; a replica that is gone needs no telling."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            with contextlib.suppress(Exception):
                await self._replicas.abort(one)

    async def check_health(self) -> None:
        """Raise `UnavailableError` when no replica can be sent to."""
        if self.errored:
            raise UnavailableError

    def shutdown(self, timeout: float | None = None) -> None:
        """End the tokenizer's threads, and the process that tries constraints."""
        self._constraints.close()
        self.renderer.shutdown()


def _refuse_what_does_not_cross(prompt: dict[str, Any], params: SamplingParams) -> None:
    """Refuse, in words, what the wire cannot carry or a client must not set (DESIGN §4, rule 8)."""
    if prompt["type"] != "token":
        raise VLLMValidationError("This server takes prompts of text or token ids only, no embeddings and no media.")
    for name in params.extra_args or ():
        if name in _NOT_FOR_CLIENTS or name.startswith(KV_CACHE_USAGE):
            raise VLLMValidationError(f"`{name}` cannot be set by clients.", parameter=name)
