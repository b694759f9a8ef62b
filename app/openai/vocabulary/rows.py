"""Token ids without a row in the model's embedding: an engine that reads one ends, and so does the next one.

vLLM lets every id pass that the tokenizer knows. So the ingress compares with the rows that the model has.

Leans on vLLM: `EngineCoreRequest`, which `InputProcessor.process_inputs` makes of a prompt, has the tokens of
`bad_words` in its parameters.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest

from configs.settings import SettingsError

logger = logging.getLogger(__name__)

_CONVERSATIONS = (
    [{"role": "user", "content": "Hello!"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello to you."},
        {"role": "user", "content": "Hello!"},
    ],
)


def require_rows(tokenizer: Any, chat_template: str | None, model: ModelConfig) -> None:
    """Raise SettingsError where ordinary prompts or the end of answers need a token that the model has no row for.

    `chat_template`: of the settings; None: the tokenizer's own. Other such tokens are told in the log.
    """
    rows = model.get_vocab_size()
    for where, token_id in _in_ordinary_use(tokenizer, chat_template, model):
        if token_id >= rows:
            raise SettingsError(
                f"model: {where} uses token {token_id} ({_shown(tokenizer, token_id)}), and the model has rows for "
                f"{rows} tokens only; use the tokenizer and the chat template that belong to these weights, or weights "
                f"whose embedding was resized."
            )
    if tokenizer.max_token_id >= rows:
        logger.warning(
            "the tokenizer knows tokens up to %d, and the model has rows for %d: prompts with one of the others are "
            "answered 400",
            tokenizer.max_token_id,
            rows,
        )


def refuse_without_rows(request: EngineCoreRequest, rows: int) -> None:
    """Raise VLLMValidationError (400) for a prompt, or words to be avoided, with a token that has no row."""
    if (highest := max(request.prompt_token_ids or (), default=0)) >= rows:
        raise VLLMValidationError(f"The prompt has token {highest}, and the model knows {rows} tokens only.")
    params = request.sampling_params
    words = (params.bad_words_token_ids if params is not None else None) or ()
    if any(token >= rows for word in words for token in word):
        raise VLLMValidationError(
            f"`bad_words` has a token that the model, which knows {rows} tokens, cannot say.", parameter="bad_words"
        )


def _in_ordinary_use(tokenizer: Any, chat_template: str | None, model: ModelConfig) -> Iterator[tuple[str, int]]:
    """Where, in words, and a token that is used there."""
    yield from (("its end of answers", token) for token in _ends(tokenizer, model))
    yield from (("its tokenizer", token) for token in tokenizer.encode("Hello"))
    template = chat_template or getattr(tokenizer, "chat_template", None) or ""
    known = dict(getattr(tokenizer, "special_tokens_map", None) or {})
    for source in template.values() if isinstance(template, dict) else [template]:
        tokens = tokenizer.encode(source, add_special_tokens=False)
        named = [tokenizer.convert_tokens_to_ids(text) for name, text in known.items()
                 if name in source and isinstance(text, str)]  # fmt: skip
        yield from (("its chat template", token) for token in (*tokens, *named) if token is not None)
    for conversation in _CONVERSATIONS:
        rendered: Any = []
        with contextlib.suppress(Exception):  # a template may want what it likes, and a request is told
            options = {"add_generation_prompt": True, "tokenize": False}
            text = tokenizer.apply_chat_template(conversation, chat_template=chat_template, **options)
            rendered = tokenizer.encode(text, add_special_tokens=False)
        yield from (("its chat template", token) for token in rendered)


def _ends(tokenizer: Any, model: ModelConfig) -> list[int]:
    configured = model.try_get_generation_config().get("eos_token_id")
    listed = configured if isinstance(configured, list) else [configured]
    return [token for token in (tokenizer.eos_token_id, *listed) if token is not None]


def _shown(tokenizer: Any, token_id: int) -> str:
    return repr(tokenizer.convert_ids_to_tokens([token_id])[0])
