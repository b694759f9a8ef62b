"""Chunks that separators begin: what holds of every prompt, and that a document is the same wherever it stands."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from app.extensions.blend.recognition import Separators, Span

DOC, END, USER = 6, 2, 4
BOUNDARIES = (0, 1, END, 3, USER, 5, DOC)
DOCUMENTS = Separators([[DOC]], BOUNDARIES)
WORDS = Separators([[7, 8], [7, 8, 9], [DOC]], BOUNDARIES)
"""Separators of several tokens, of which one begins another."""

prompts = st.lists(st.integers(0, 12), max_size=200)


def document(number: int, tokens: int) -> list[int]:
    return [DOC, *(100 + (number * 31 + place) % 900 for place in range(tokens - 1))]


def test_a_chunk_begins_with_its_separator_and_ends_before_the_next_boundary() -> None:
    prompt = [1, 3, 50, *document(1, 5), *document(2, 4), END, USER, 60, 61]
    assert DOCUMENTS.chunks(prompt, 1, 256) == [Span(3, 5), Span(8, 4)]
    assert DOCUMENTS.chunks(prompt, 5, 256) == [Span(3, 5)], "the other one is shorter"
    assert DOCUMENTS.chunks(prompt, 1, 1) == [Span(3, 5)]


def test_what_begins_a_prompt_is_its_prefix_and_the_last_chunk_ends_with_it() -> None:
    assert DOCUMENTS.chunks([*document(1, 5), *document(2, 4)], 1, 256) == [Span(5, 4)]


def test_of_two_separators_the_longer_one_is_meant_and_half_a_one_is_text() -> None:
    assert WORDS.chunks([1, 7, 8, 9, 50, 7, 8, 51, 7, 52], 1, 256) == [Span(1, 4), Span(5, 5)]
    assert Separators([[USER, 50]], BOUNDARIES).chunks([1, USER, 50, 51, USER, 60], 1, 256) == [Span(1, 3)], (
        "a boundary ends a chunk also where it might have begun a separator"
    )


def test_a_boundary_within_a_separator_does_not_end_its_chunk() -> None:
    assert Separators([[USER, 50, END]], BOUNDARIES).chunks([1, USER, 50, END, 51, 52, END], 1, 256) == [Span(1, 5)]


def test_every_special_token_may_begin_a_chunk() -> None:
    turns = Separators([[token] for token in BOUNDARIES], BOUNDARIES)
    assert turns.chunks([1, 3, 50, 51, END, USER, 60, 61, 62, 5], 3, 256) == [Span(1, 3), Span(5, 4)]
    assert Separators([], BOUNDARIES).chunks([1, DOC, 50, 51], 1, 256) == []


@given(prompts, st.sampled_from([DOCUMENTS, WORDS]), st.integers(1, 8), st.integers(0, 8))
@settings(max_examples=400, deadline=None)
def test_chunks_lie_in_the_prompt_in_order_and_hold_no_other_boundary(
    prompt: list[int], separators: Separators, min_tokens: int, most: int
) -> None:
    chunks = separators.chunks(prompt, min_tokens, most)

    assert len(chunks) <= most
    assert all(chunk.start > 0 and chunk.tokens >= min_tokens for chunk in chunks)
    assert all(before.end <= after.start for before, after in itertools.pairwise(chunks))
    for chunk in chunks:
        inside = prompt[chunk.start : chunk.end]
        assert len(inside) == chunk.tokens
        (began, *_) = [one for one in separators.sequences if tuple(inside[: len(one)]) == one]
        rest = inside[len(began) :]
        assert not set(rest) & set(BOUNDARIES)
        assert not any(
            tuple(rest[at : at + len(one)]) == one for one in separators.sequences for at in range(len(rest))
        )


@given(st.permutations(range(5)), st.integers(1, 40), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_document_is_the_same_chunk_at_every_place(order: list[int], before: int, chance: random.Random) -> None:
    documents = [document(number, 10 + 7 * number) for number in range(5)]
    prompt = [1, 3, *(chance.randrange(1000, 2000) for _ in range(before))]
    prompt += [token for number in order for token in documents[number]] + [END, USER, 60]

    chunks = DOCUMENTS.chunks(prompt, 10, 256)
    assert [prompt[chunk.start : chunk.end] for chunk in chunks] == [documents[number] for number in order]


def test_a_long_prompt_of_nothing_but_separators_is_read_once() -> None:
    asked: list[int] = []

    class Counting(list[int]):
        def __getitem__(self, at: int | slice) -> int | list[int]:  # type: ignore[override]
            asked.append(at.stop - at.start if isinstance(at, slice) else 1)
            return super().__getitem__(at)

    prompt = Counting([DOC] * 20_000)
    assert Separators([[DOC], [DOC, 50]], BOUNDARIES).chunks(prompt, 2, 256) == []
    assert sum(asked) < 10 * len(prompt)
