"""In a chat, what a client writes is text: no client forges a turn by typing `<|im_end|>`.

A chat template writes special tokens as text, among the texts of its messages, and the tokenizer cannot tell them
apart. So every special token in a client's strings is replaced, before the template is rendered, by a mark that no
client can guess; the rendered prompt is cut at the marks, and there the tokens are those of the characters. A prompt
without special tokens in its strings takes none of these steps and has the tokens that it always had.

What clients write into /v1/completions and /tokenize as a raw prompt is not touched: there special tokens are what they
name, as with vLLM and OpenAI. Tokens that a tokenizer adds but does not call special, such as `<tool_call>`, are left.
So are the tags of a model's thoughts in an assistant's messages: templates cut thoughts there, and must see them.

A template that does more with a text than to print it, such as cutting it or printing a list's form, may tear a mark.
Then the prompt with marks is another one than without. It is rendered once more with each special token torn by us: an
invisible character in it makes it text, the same one in every request, so that the prompt's KV is found again.

Leans on vLLM: every renderer turns messages into text by `render_messages_async(messages, params)`, which gives
a conversation and a prompt, and text into tokens by `_tokenize_prompt_async(prompt, params)`, which is
`_tokenize_prompt` on `_executor`. Mistral's tokenizers are left alone: they take a message's text as text.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tokenizers
from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer, ChatParams, TokenizeParams
from vllm.utils.async_utils import make_async
from vllm.utils.mistral import is_mistral_tokenizer

_MARK = "\ue000{}:{}\ue001"  # characters of private use, which templates print as they are
_MARKS = re.compile("\ue000([0-9a-f]{32}):([0-9]+)\ue001")
_TEAR = "\u2060"
"""WORD JOINER: no width, and no space to any template."""
_THOUGHTS = re.compile("</?(?:think|thinking|thought|thoughts|reasoning)>")
_MARKED = "crosskv_marked"
"""Field of a rendered prompt: the nonce of the marks in it."""


def keep_user_text(renderer: BaseRenderer) -> None:
    """Let `renderer` take special tokens in messages as text, from now on. Not to be called twice for one."""
    tokenizer: Any = renderer.tokenizer
    if tokenizer is None or is_mistral_tokenizer(tokenizer):
        return
    texts = SpecialTexts(tokenizer)
    render, tokenize = renderer.render_messages_async, renderer._tokenize_prompt_async

    async def render_marked(messages: list[Any], params: ChatParams) -> tuple[Any, Any]:
        messages = _mapped(messages, str)  # it is rendered twice: what can be read once becomes a list
        marks = Marks(texts)
        marked = marks.put_in_messages(messages)
        kwargs = marks.put(params.chat_template_kwargs)
        if not marks.used:
            return await render(marked, params)
        prompt: Any
        conversation, prompt = await render(marked, dataclasses.replace(params, chat_template_kwargs=kwargs))
        if not isinstance(prompt.get("prompt"), str):
            raise VLLMValidationError("Special tokens cannot be written in messages here.", parameter="messages")
        _, plain = await render(messages, params)
        if plain.get("prompt") == texts.unmarked(prompt["prompt"], marks.nonce):
            return marks.take_back(conversation), {**prompt, _MARKED: marks.nonce}
        tears = Tears(texts)
        torn = dataclasses.replace(params, chat_template_kwargs=tears.put(params.chat_template_kwargs))
        conversation, prompt = await render(tears.put_in_messages(messages), torn)
        return tears.take_back(conversation), prompt

    def tokenize_pieces(prompt: dict[str, Any], params: TokenizeParams) -> dict[str, Any]:
        nonce = prompt.pop(_MARKED)
        pieces = texts.cut(prompt["prompt"], nonce)
        written = [texts.tokens(piece) for piece in pieces if isinstance(piece, int)]
        if params.max_total_tokens is not None and sum(map(len, written)) > params.max_total_tokens:
            raise VLLMValidationError(
                f"The messages are longer than the model's context, which is {params.max_total_tokens} tokens.",
                parameter="messages",
            )
        first, *others = [piece for piece in pieces if isinstance(piece, str)]
        made = renderer._tokenize_prompt({**prompt, "prompt": first}, params)  # type: ignore[typeddict-item]
        within = dataclasses.replace(params, add_special_tokens=False)
        token_ids = list(made["prompt_token_ids"])
        for special, text in zip(written, others, strict=True):
            token_ids += special
            token_ids += renderer._tokenize_prompt({"prompt": text}, within)["prompt_token_ids"]
        return {**made, "prompt": texts.unmarked(prompt["prompt"], nonce), "prompt_token_ids": token_ids}

    tokenize_pieces_async = make_async(tokenize_pieces, executor=renderer._executor)

    async def tokenize_marked(prompt: Any, params: TokenizeParams) -> Any:
        return await (tokenize_pieces_async(dict(prompt), params) if _MARKED in prompt else tokenize(prompt, params))

    renderer.render_messages_async = render_marked  # type: ignore[method-assign]
    renderer._tokenize_prompt_async = tokenize_marked


class SpecialTexts:
    """A tokenizer's special tokens, as texts."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {*tokenizer.all_special_tokens, *(str(token.content) for token in added if token.special)}
        self.texts = sorted((text for text in special if text), key=lambda text: (-len(text), text))
        self.number = {text: number for number, text in enumerate(self.texts)}
        self.pattern = re.compile("|".join(map(re.escape, self.texts))) if self.texts else None
        self._encode = _encoder_of_text(tokenizer)
        self.tokens = functools.cache(lambda number: self._encode(self.texts[number]))
        """The token ids of a special token's characters, by its number."""

    def cut(self, text: str, nonce: str) -> list[str | int]:
        """The texts between marks, and in their places the numbers of the special tokens that were written there."""
        pieces: list[str | int] = []
        end = 0
        for mark in _MARKS.finditer(text):
            if mark[1] == nonce:
                pieces += [text[end : mark.start()], int(mark[2])]
                end = mark.end()
        return [*pieces, text[end:]]

    def unmarked(self, text: str, nonce: str) -> str:
        """The text as the client wrote it."""
        return "".join(piece if isinstance(piece, str) else self.texts[piece] for piece in self.cut(text, nonce))


class _Changes:
    """What takes the place of special tokens in one prompt's strings."""

    def __init__(self, texts: SpecialTexts) -> None:
        self.used = False
        self._texts = texts

    def put(self, value: Any) -> Any:
        """`value` with a change for each special token in its strings; one-shot iterators in it become lists."""
        return _mapped(value, self._changed) if self._texts.pattern else value

    def put_in_messages(self, messages: list[Any]) -> list[Any]:
        """The same for messages: tags of thoughts stay in an assistant's."""
        return [_mapped(each, self._kept) if _is_answer(each) else self.put(each) for each in messages]

    def _kept(self, text: str) -> str:
        pieces, tags = _THOUGHTS.split(text), [*_THOUGHTS.findall(text), ""]
        return "".join(self._changed(piece) + tag for piece, tag in zip(pieces, tags, strict=True))

    def _changed(self, text: str) -> str:
        if self._texts.pattern is None:
            return text
        changed, count = self._texts.pattern.subn(lambda found: self._change(found[0]), text)
        self.used = self.used or count > 0
        return changed

    def _change(self, special: str) -> str:
        raise NotImplementedError


class Marks(_Changes):
    """The marks of one prompt."""

    def __init__(self, texts: SpecialTexts) -> None:
        super().__init__(texts)
        self.nonce = secrets.token_hex(16)

    def take_back(self, value: Any) -> Any:
        """The inverse of `put`."""
        return _mapped(value, lambda text: self._texts.unmarked(text, self.nonce))

    def _change(self, special: str) -> str:
        return _MARK.format(self.nonce, self._texts.number[special])


class Tears(_Changes):
    """Special tokens that are none any more, for templates that would tear marks."""

    def take_back(self, value: Any) -> Any:
        """The inverse of `put`, but for texts that were torn before, and for tokens of one character."""
        torn = {change: text for text in self._texts.texts if (change := self._change(text))}
        pattern = re.compile("|".join(map(re.escape, torn)) or "(?!)")
        return _mapped(value, lambda text: pattern.sub(lambda found: torn[found[0]], text))

    def _change(self, special: str) -> str:
        """The same with a tear behind each character; one that holds another special token then is left out."""
        assert self._texts.pattern is not None
        torn = _TEAR.join(special)
        return "" if self._texts.pattern.search(torn) else torn


def _is_answer(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(name, change): _mapped(inner, change) for name, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [_mapped(inner, change) for inner in value]
    return value


def _encoder_of_text(tokenizer: Any) -> Callable[[str], list[int]]:
    """What encodes a text, special tokens in it as text; with a copy, since others use the tokenizer meanwhile."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        copy = tokenizers.Tokenizer.from_str(backend.to_str())
        copy.encode_special_tokens = True
        return lambda text: list(copy.encode(text, add_special_tokens=False).ids)
    return lambda text: tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text, split_special_tokens=True))
