"""How a model's chat template and tokenizer mark turns, found out by rendering conversations at start.

Leans on vLLM: `BaseRenderer.render_messages(messages, params)` gives a conversation and a prompt with its text;
`ChatCompletionRequest.build_chat_params` makes the parameters that the chat route would make.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import BaseRenderer
from vllm.utils.mistral import is_mistral_tokenizer

from app.answers.turns import TurnMarks
from app.dialects.content_format import Format

_QUESTION, _ANSWER = {"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello to you."}


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
