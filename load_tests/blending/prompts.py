"""A user's own prompts as token ids, and the chunks in them, found as the server finds them.

A file of JSON lines. Each is `{"messages": [...]}`, with `documents` and `tools` too where the template takes
them, or `{"prompt": "..."}`. It may say the `answer` to be judged; without it the model's own greedy answer is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.extensions.blend.recognition import Separators
from app.gate.kv_cache_field import MOST_CHUNKS
from load_tests.measuring.program import InputError

MOST_LINE_BYTES = 16 << 20


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    ids: list[int]
    chunks: list[tuple[int, int]]
    """[start, stop) of each, in order; a chunk begins with its separator."""
    answer: list[int] = field(default_factory=list)
    """Empty: not given."""


def special_marks(tokenizer: Any) -> tuple[list[int], set[int]]:
    """(separators, ends) where no setting says: the template's document token, else every special token.

    A chunk ends where another one begins, or at any special token that is no separator.
    """
    special = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    documents = [index for index, text in special.items() if "doc" in text.lower() and text in template]
    separators = documents or sorted(special)
    return separators, set(special) - set(separators)


def read_prompts(
    file: Path, tokenizer: Any, separators: Sequence[str], least_tokens: int, most: int
) -> tuple[list[Prompt], int]:
    """The first `most` prompts with chunks, and how many of those read had none. Raises InputError."""
    marks, ends = special_marks(tokenizer)
    wanted = [[mark] for mark in marks]
    if separators:
        wanted = [tokenizer.encode(text, add_special_tokens=False) for text in separators]
        ends |= set(marks) - {mark[0] for mark in wanted if len(mark) == 1}
    server = Separators(wanted, ends)
    found: list[Prompt] = []
    without = 0
    for number, line in _lines(file):
        ids, answer = _encoded(line, tokenizer, f"{file}, line {number}")
        spans = server.chunks(ids, least_tokens, MOST_CHUNKS)
        if spans:
            found.append(Prompt(ids, [(span.start, span.end) for span in spans], answer))
        else:
            without += 1
        if len(found) == most:
            break
    if not found:
        names = ", ".join(repr(tokenizer.decode(mark)) for mark in wanted)
        raise InputError(
            f"No prompt of {file} has a chunk of {least_tokens} tokens that begins with {names}; name what yours begin "
            "with by --separator, or allow shorter ones by --min-chunk-tokens."
        )
    return found, without


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if len(line) > MOST_LINE_BYTES:
                    raise InputError(f"{file}, line {number} is longer than {MOST_LINE_BYTES >> 20} MiB.")
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read as JSON lines ({error}).") from None


def _encoded(line: str, tokenizer: Any, where: str) -> tuple[list[int], list[int]]:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON ({error}).") from None
    if not isinstance(given, dict) or ("messages" in given) == ("prompt" in given):
        raise InputError(f'{where} must be an object with either "messages" or "prompt".')
    answer, prompt = given.get("answer", ""), given.get("prompt", "")
    if not isinstance(answer, str) or not isinstance(prompt, str):
        raise InputError(f'{where}: "prompt" and "answer" are texts.')
    if "prompt" in given:
        ids = tokenizer.encode(prompt)
    else:
        try:
            ids = tokenizer.apply_chat_template(
                given["messages"], documents=given.get("documents"), tools=given.get("tools"),
                add_generation_prompt=True, tokenize=True, return_dict=False,
            )  # fmt: skip
        except Exception as error:  # a template is a program of the model's maker: it may raise anything
            raise InputError(f"{where}: the model's chat template refuses these messages ({error}).") from None
    return list(ids), tokenizer.encode(answer, add_special_tokens=False) if answer else []
