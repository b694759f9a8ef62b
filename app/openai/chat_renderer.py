"""vLLM's renderer of chats, which puts sampled answers back (`app.answers`): for all routes of conversations and the
control API.

Left as the template renders it, on purpose: prompts that are truncated, whose tokens' logprobs or offsets the client
wants to see, or that would no longer leave room for the answer; and /tokenize, which tells what the tokenizer does.

Leans on vLLM: `OnlineRenderer.render_chat` is what `OpenAIServingChat.render_chat_request` calls, `render_responses`
what `OpenAIServingResponses` does; they return an `ErrorResponse`, or messages and one input, a dictionary in which
further keys travel to `EngineClient.generate`. Both call `preprocess_chat(request, messages, …)`. Turns are found out
by `BaseRenderer.render_messages(messages, params)`, which gives a conversation and a prompt with its text, with the
parameters of `ChatCompletionRequest.build_chat_params`. Every renderer turns text into tokens by
`_tokenize_prompt_async(prompt, params)` (`tests/app/openai/test_vllm_contract.py`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import tokenizers
from vllm.config import VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput
from vllm.renderers import BaseRenderer, TokenizeParams
from vllm.renderers.chat_utils import ChatTemplateResolutionError, ConversationMessage, load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer, ResponsesRenderResult
from vllm.utils.mistral import is_mistral_tokenizer

from app.answers.memory import AnswerMemory
from app.answers.returns import History, Returns
from app.answers.turns import Answers, Conversation, TurnMarks
from app.dialects.calls import holding_forced_calls, level_of_vllm
from app.dialects.templates import Format, content_format, in_place, prints_system_in_place
from app.gate.kv_cache_field import FIELD, read_field
from app.gate.request_context import current_request
from app.metrics.ingress import IngressMetrics
from app.openai.prompt_keys import PromptKeys
from app.openai.vocabulary.rows import require_rows
from configs.http_section import HTTPSettings
from configs.settings import PROJECT_ROOT, Settings

logger = logging.getLogger(__name__)

OFFERS_TOOLS = "crosskv_offers_tools"
"""Key of a rendered chat whose answers may be remembered; says whether tools were offered."""
_NO_TEMPLATE = "This model has no chat template: the setting `chat_template` can name one."
_PARSER_FLAG, _NO_PARSER = (
    "--tool-call-parser",
    "This server reads no tool calls: the setting `engine.tool_call_parser` names the model's parser.",
)


class ChatRenderer(OnlineRenderer):
    """See the module's docstring."""

    keys: PromptKeys
    answers: Answers | None = None
    """What puts sampled answers back; None: nothing is known of the turns of this model's chats."""
    orders_in_place = False
    """Late messages of the system and the developer stay where they stand (`app.dialects.templates`)."""

    def give_back(self, keys: PromptKeys, answers: Answers | None) -> None:
        """Put these answers back from now on, of conversations under these keys. Before the first request."""
        self.keys, self.answers = keys, answers

    async def preprocess_chat(self, request: Any, messages: list[Any], *args: Any, **more: Any) -> Any:
        """See vLLM's."""
        return await super().preprocess_chat(
            request, in_place(messages) if self.orders_in_place else messages, *args, **more
        )

    async def render_chat(
        self, request: ChatCompletionRequest, *, skip_mm_cache: bool = False
    ) -> tuple[list[ConversationMessage], list[EngineInput]] | ErrorResponse:
        """See vLLM's."""
        messages = list(request.messages)
        try:
            rendered = await super().render_chat(request, skip_mm_cache=skip_mm_cache)
        except ChatTemplateResolutionError as error:
            raise VLLMValidationError(_NO_TEMPLATE, parameter="messages") from error
        if isinstance(rendered, ErrorResponse) and _PARSER_FLAG in rendered.error.message:
            raise VLLMValidationError(_NO_PARSER, parameter="tool_choice")
        if self.answers is not None and not isinstance(rendered, ErrorResponse):
            prompt: Any = rendered[1][0]
            if prompt["type"] == "token" and request.truncate_prompt_tokens is None:
                is_answered = request.add_generation_prompt or request.continue_final_message
                if is_answered and current_request().parsed:  # else the control API only asks
                    prompt[OFFERS_TOOLS] = bool(request.tools)
                if request.prompt_logprobs is None and not request.return_token_offsets:
                    asked = request.max_completion_tokens or vars(request)["max_tokens"]
                    self._give_answers_back(self.answers, request, messages, prompt, asked)
        return rendered

    async def render_responses(self, request: ResponsesRequest, **how: Any) -> ResponsesRenderResult | ErrorResponse:
        """See vLLM's."""
        try:
            rendered = await super().render_responses(request, **how)
        except ChatTemplateResolutionError as error:
            raise VLLMValidationError(_NO_TEMPLATE, parameter="input") from error
        except (AttributeError, LookupError, AssertionError) as error:  # it reads items that it has not validated
            raise VLLMValidationError("`input` has an item of the wrong shape.", parameter="input") from error
        if self.answers is not None and not isinstance(rendered, ErrorResponse):
            prompt: Any = rendered.engine_input
            if prompt["type"] == "token" and request.truncation in (None, "disabled"):
                prompt[OFFERS_TOOLS] = bool(request.tools)
                messages = list(rendered.messages)
                self._give_answers_back(self.answers, request, messages, prompt, request.max_output_tokens)
        return rendered

    def _give_answers_back(
        self,
        answers: Answers,
        request: ChatCompletionRequest | ResponsesRequest,
        messages: list[Any],
        prompt: Any,
        asked: int | None,
    ) -> None:
        context = current_request()
        field = read_field((request.model_extra or {}).get(FIELD))
        salt = self.keys.salt(context.tenant, request.cache_salt, field, request.model)
        whose = Conversation(context.tenant, salt)
        rendered = list(prompt["prompt_token_ids"])
        try:
            spliced = answers.splice(whose, rendered, History(messages) if context.parsed else None)
        except Exception:  # it is only for speed, and no request fails for it
            answers.note_defect()
            return
        room = self.model_config.max_model_len - (asked or 1)
        if room < len(rendered):  # the answer is cut to what is left, whatever the client asks for
            room = self.model_config.max_model_len - 1
        longest = max(len(rendered), room)
        if len(spliced) <= longest:
            prompt["prompt_token_ids"] = spliced


def require_room(prompts: Sequence[Any], most_tokens: int, param: str) -> None:
    """Raise VLLMValidationError (400) for a rendered prompt that fills the context, where an answer is wanted."""
    longest = max((len(prompt.get("prompt_token_ids") or ()) for prompt in prompts), default=0)
    if current_request().parsed and longest >= most_tokens:
        raise VLLMValidationError(
            f"The prompt has {longest} tokens and fills the model's context of {most_tokens}: no room is left for an "
            "answer. Send a shorter one.",
            parameter=param,
        )


def build_chat_renderer(settings: Settings, vllm_config: VllmConfig, renderer: BaseRenderer) -> ChatRenderer:
    """Return the renderer of this server's chats, without answers yet. Raises SettingsError for what cannot be."""
    engine, model = settings.engine, vllm_config.model_config
    chat_template = load_chat_template(PROJECT_ROOT / settings.chat_template if settings.chat_template else None)
    require_rows(renderer.get_tokenizer(), chat_template, model)
    form = content_format(renderer, chat_template)
    rendering = ChatRenderer(
        model,
        renderer,
        request_logger=None,
        chat_template=chat_template,
        chat_template_content_format=form,
        enable_auto_tools=engine.auto_tool_choice,
        tool_parser=engine.tool_call_parser,
        reasoning_parser=engine.reasoning_parser,
        tool_strict_level=level_of_vllm(settings),
    )
    rendering.parser = holding_forced_calls(rendering.parser, settings)
    rendering.warmup()
    rendering.orders_in_place = prints_system_in_place(renderer, chat_template, form)
    return rendering


def remembered_answers(
    rendering: ChatRenderer, http: HTTPSettings, returns: Returns, metrics: IngressMetrics
) -> Answers | None:
    """The memory of this ingress, and one line in the log about it; None where turns have no marks."""
    renderer = rendering.renderer
    marks = turn_marks(renderer, rendering.chat_template, rendering.chat_template_content_format)
    if isinstance(marks, str):
        logger.warning("answers are not given back as they were sampled: %s", marks)
        return None
    wanted = http.splice_answers
    splices = wanted == "always" or (wanted == "auto" and marks.append_only)
    template = "append-only" if marks.append_only else "not append-only: it changes turns that it has rendered before"
    logger.info(
        "answers are %s into the next prompt as they were sampled (http.splice_answers: %s; the chat template is %s)",
        "put back" if splices else "not put back",
        wanted,
        template,
    )
    tokenizer: Any = renderer.tokenizer
    memory = AnswerMemory(int(http.answer_memory_bytes))
    metrics.show_answers(lambda: memory.nbytes, lambda: memory.places, lambda: memory.forgotten)
    return Answers(tokenizer.backend_tokenizer, marks, memory, returns, splices, metrics.count_returned)


_QUESTION, _ANSWER = {"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello to you."}


def time_tokenizing(renderer: BaseRenderer) -> None:
    """Let `renderer` tell the HTTP request that it works for how long a prompt's text takes to become tokens.

    That is the stage `tokenize`, inside the stage `render`. Not to be called twice for one renderer.
    """
    tokenize = renderer._tokenize_prompt_async

    async def tokenize_timed(prompt: Any, params: TokenizeParams) -> Any:
        began = time.monotonic()
        made = await tokenize(prompt, params)
        with contextlib.suppress(LookupError):  # while the server warms up there is no HTTP request
            current_request().stages.inside_next("tokenize", time.monotonic() - began)
        return made

    renderer._tokenize_prompt_async = tokenize_timed


def turn_marks(renderer: BaseRenderer, chat_template: str | None, form: Format = "auto") -> TurnMarks | str:
    """The marks of a model's turns, or, in words, why they cannot be known. Does not raise."""
    tokenizer: Any = renderer.tokenizer
    if tokenizer is None or is_mistral_tokenizer(tokenizer):
        return "the tokenizer is not one of Hugging Face's"
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), tokenizers.Tokenizer):
        return "the tokenizer cannot be asked for the text of single tokens"
    boundaries = frozenset(int(token) for token in tokenizer.added_tokens_decoder)

    def render(*messages: dict[str, str], add_generation_prompt: bool = True) -> str:
        request = ChatCompletionRequest.model_validate(
            {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        )
        params = request.build_chat_params(chat_template, form).with_defaults({"tools": None, "tokenize": False})
        _, prompt = renderer.render_messages(request.messages, params)
        text: Any = prompt["prompt"]  # type: ignore[typeddict-item]
        if not isinstance(text, str):
            raise TypeError("the template gives no text")
        return text

    def tokens(text: str) -> list[int]:
        return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    try:
        asked, bare = render(_QUESTION), render(_QUESTION, add_generation_prompt=False)
        opening = tokens(asked)[len(tokens(bare)) :] if asked.startswith(bare) else []
        start = next((token for token in opening if token in boundaries), None)
        if start is None:
            return "no special token begins an answer's turn in its chat template"
        return TurnMarks(start, boundaries, _is_append_only(render, asked))
    except Exception as error:
        return f"its chat template does not render a plain conversation ({type(error).__name__})"


def _is_append_only(render: Any, asked: str) -> bool:
    second = render(_QUESTION, _ANSWER, _QUESTION)
    third = render(_QUESTION, _ANSWER, _QUESTION, _ANSWER, _QUESTION)
    return second.startswith(asked) and _ANSWER["content"] in second[len(asked) :] and third.startswith(second)
