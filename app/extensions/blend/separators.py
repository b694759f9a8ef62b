"""What the chunks of this model's prompts begin with, found out once, at start.

`blending.separators` says it, as texts or as token ids. Where it says nothing, it is the chat template's document
token: two documents are rendered, and the last special token before the first one's text, if a second one of its kind
stands between the two texts, begins each. Where there is none, every special token begins a chunk: a turn of a chat is
one, then. Special tokens are good separators because tokenizers split texts there, whatever stands next to them.

Leans on vLLM: `BaseRenderer.render_messages(messages, params)` and `ChatCompletionRequest.build_chat_params`, as
`app.openai.chat_renderer` does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import BaseRenderer

from app.extensions.blend.recognition import Separators
from configs.errors import SettingsError

logger = logging.getLogger(__name__)

_SETTING = "blending.separators"
_QUESTION = {"role": "user", "content": "What do they say?"}
_TEXTS = ("The first text.", "The second text.")
_NEIGHBOURS = (("", "a"), ("a", "a"), ("a ", " a"), ("a.", "A"), ("a\n", "\na"), ("1", "1"))
"""What may stand before and behind a separator, to see whether its tokens stay what they are alone."""


def find_separators(
    wanted: Sequence[str | Sequence[int]] | None, renderer: BaseRenderer, chat_template: str | None
) -> Separators:
    """The separators of a model's prompts, and one line in the log about them; `wanted` is `blending.separators`.

    Raises SettingsError for a separator that cannot occur in a prompt.
    """
    tokenizer: Any = renderer.tokenizer
    special = _special_tokens(tokenizer)
    if wanted is not None:
        vocabulary = renderer.model_config.get_vocab_size()
        sequences = [_tokens(one, tokenizer) if isinstance(one, str) else _known(one, vocabulary) for one in wanted]
        said = ", ".join(_shown(one) for one in wanted) or "nothing"
        logger.info("chunks of blended prompts begin with %s (%s)", said, _SETTING)
        return Separators(sequences, special.values())
    document = _document_token(renderer, chat_template, special)
    if document is not None:
        logger.info("chunks of blended prompts begin with %s, the chat template's document token", document)
        return Separators([[special[document]]], special.values())
    if special:
        logger.info(
            "chunks of blended prompts begin with any special token: the chat template has no token for documents (%s)",
            _SETTING,
        )
    else:
        logger.info("blended prompts have only the chunks that requests name: the tokenizer has no special tokens")
    return Separators([[token] for token in special.values()], special.values())


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """By text, the tokens that the tokenizer calls special. None where it cannot be asked."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    found = {str(token.content): int(number) for number, token in added.items() if token.special}
    texts, numbers = getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ())
    return {**dict(zip(texts, map(int, numbers), strict=False)), **found}


def _known(separator: Sequence[int], vocabulary: int) -> list[int]:
    wrong = next((token for token in separator if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise SettingsError(f"{_SETTING}: {wrong} is no token of the model, whose ids are below {vocabulary}.")
    return list(separator)


def _tokens(separator: str, tokenizer: Any) -> list[int]:
    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    if tokenizer is None:
        raise SettingsError(f"{_SETTING}: the model has no tokenizer for {separator!r}; give token ids.")
    sequence = encode(separator)
    if not sequence:
        raise SettingsError(f"{_SETTING}: the tokenizer makes no token of {separator!r}; give another one, or ids.")
    if not all(_holds(encode(before + separator + behind), sequence) for before, behind in _NEIGHBOURS):
        logger.warning(
            "%s: %r merges with texts next to it into other tokens; where it does, no chunk begins, which costs hits",
            _SETTING,
            separator,
        )
    return sequence


def _holds(token_ids: Sequence[int], sequence: Sequence[int]) -> bool:
    size = len(sequence)
    return any(list(token_ids[at : at + size]) == list(sequence) for at in range(len(token_ids) - size + 1))


def _shown(separator: str | Sequence[int]) -> str:
    return repr(separator) if isinstance(separator, str) else f"the tokens {list(separator)}"


def _document_token(renderer: BaseRenderer, chat_template: str | None, special: dict[str, int]) -> str | None:
    """The special token that begins each document in this chat template; None where there is none. Does not raise."""
    try:
        text = _rendered_documents(renderer, chat_template)
    except Exception as error:
        logger.info("the chat template does not render documents (%s)", type(error).__name__)
        return None
    first, second = (text.find(one) for one in _TEXTS)
    if first < 0 or second < first:
        return None
    place, token = max(((text.rfind(one, 0, first), one) for one in special), default=(-1, ""))
    return token if place >= 0 and text.find(token, first, second) >= 0 else None


def _rendered_documents(renderer: BaseRenderer, chat_template: str | None) -> str:
    documents = [{"title": f"{number}", "text": text, "content": text} for number, text in enumerate(_TEXTS)]
    request = ChatCompletionRequest.model_validate({"messages": [_QUESTION], "documents": documents})
    params = request.build_chat_params(chat_template, "auto").with_defaults({"tools": None, "tokenize": False})
    _, prompt = renderer.render_messages(request.messages, params)
    text: Any = prompt["prompt"]  # type: ignore[typeddict-item]
    return str(text)
