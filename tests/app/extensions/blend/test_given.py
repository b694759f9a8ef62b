"""Chunks that a request names: their tokens but for the two ends, found where they stand and nowhere else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.extensions.blend.recognition import GivenTexts, Span

A, B = list(range(100, 120)), list(range(200, 230))


def find(prompt: list[int], *texts: list[int], min_tokens: int = 4, most: int = 256) -> tuple[list[Span], int]:
    return GivenTexts(texts, min_tokens).find(prompt, most)


def test_a_text_is_found_without_its_two_ends_which_may_have_merged() -> None:
    prompt = [1, 2, 3, 999, *A[1:-1], 998, 5, *B, 6, *A]
    assert find(prompt, B, A) == ([Span(4, 18), Span(25, 28), Span(56, 18)], 0)


def test_what_is_absent_too_short_or_half_there_is_counted() -> None:
    prompt = [1, *A, 2]
    assert find(prompt, B, A[:5], [*A, 3, 4], [], [7]) == ([], 5)
    assert find(prompt, A, B) == ([Span(2, 18)], 1)
    assert find(prompt, A, A) == ([Span(2, 18)], 0), "named twice, found once"
    assert find(prompt) == ([], 0)


def test_the_beginning_of_the_prompt_is_its_prefix_and_no_chunk() -> None:
    assert find(A[1:], A) == ([], 1)
    assert find(A, A) == ([Span(1, 18)], 0)


def test_of_texts_that_begin_alike_the_longest_one_is_found() -> None:
    short, long = [9, *A, 9], [9, *A, *B, 9]
    assert find([1, *A, *B, 2, *A, 3], short, long) == ([Span(1, 50), Span(52, 20)], 0)


def test_occurrences_do_not_overlap() -> None:
    assert find([0, *[5] * 7], [9, 5, 5, 5, 9], min_tokens=3) == ([Span(1, 3), Span(4, 3)], 0)


def test_no_more_are_found_than_wanted() -> None:
    assert find([1, *A * 10], A, most=3)[0] == [Span(2, 18), Span(22, 18), Span(42, 18)]


def test_nothing_is_found_between_tokens() -> None:
    """The bytes of the wanted tokens stand in the prompt, one byte away from where tokens begin."""
    assert find([0, *[1 << 8] * 20], [7, *[1] * 6, 7]) == ([], 1)
    assert find([0, *[1 << 24] * 20], [7, *[1] * 6, 7]) == ([], 1)


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=5),
    st.integers(1, 4),
)
@settings(max_examples=500, deadline=None)
def test_it_finds_what_a_search_by_hand_finds(prompt: list[int], texts: list[list[int]], min_tokens: int) -> None:
    wanted = sorted((text[1:-1] for text in texts if len(text) - 2 >= min_tokens), key=len, reverse=True)
    expected, place = [], 1
    while place < len(prompt):
        size = next((len(one) for one in wanted if prompt[place : place + len(one)] == one), 0)
        if size:
            expected.append(Span(place, size))
        place += size or 1
    seen = [prompt[span.start : span.end] for span in expected]

    assert find(prompt, *texts, min_tokens=min_tokens) == (expected, sum(text[1:-1] not in seen for text in texts))


def test_texts_that_all_but_match_everywhere_meet_a_bound() -> None:
    """Comparing them at every place would take minutes of a long prompt; nothing behind the bound is found."""
    hostile = [[9, *[5] * (3_000 + number), 6, 9] for number in range(256)]
    prompt = [*[5] * 8_000, 1, *A, 2]
    assert find(prompt, A) == ([Span(8_002, 18)], 0)
    assert find(prompt, *hostile, A) == ([], 257)
