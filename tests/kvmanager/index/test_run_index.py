"""The search by the block, against an index of single blocks that is obviously right."""

import hypothesis.strategies as st
from hypothesis import given

from kvmanager.index.run_index import Run, RunIndex
from kvmanager.segments.keys import block_hashes
from kvmanager.segments.spans import join_marks

sequences = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def marks_of(tokens):
    return join_marks(block_hashes(tokens, 1, "tests"))


def blocks_of(marks):
    return [marks[at : at + 8] for at in range(0, len(marks), 8)]


def reach(marks, held):
    """Leading blocks of a prompt that lie in any held run."""
    stored = {block for run in held for block in blocks_of(run.marks)}
    return next((number for number, block in enumerate(blocks_of(marks)) if block not in stored), len(marks) // 8)


def runs_of(data, most):
    """Runs of random sequences, none of which crosses a multiple of ``most`` blocks."""
    runs = []
    for tokens in data.draw(st.lists(sequences, max_size=12)):
        start = data.draw(st.integers(0, len(tokens) - 1))
        end = data.draw(st.integers(start + 1, min(len(tokens), (start // most + 1) * most)))
        runs.append(Run(marks_of(tokens)[8 * start : 8 * end]))
    return runs


@given(st.integers(1, 5), sequences, st.data())
def test_a_path_reaches_as_far_as_single_blocks_of_what_is_held_do(most, tokens, data):
    index, runs = RunIndex(), runs_of(data, most)
    for run in runs:
        index.add(run)
    for run in [run for run in runs if data.draw(st.booleans())]:
        index.remove(run)
        runs.remove(run)
    held = [run for run in runs if data.draw(st.booleans())]
    marks = marks_of(tokens)

    path, ends, holds = index.path(marks, most, lambda run: run if run in held else None)

    assert (ends[-1] if ends else 0) == reach(marks, held)
    assert path == holds
    for run, begin, end in zip(path, [0, *ends], ends, strict=False):
        assert run in held
        assert begin < end
        assert blocks_of(marks)[begin:end] == [block for block in blocks_of(marks)[begin:end] if block in run.marks]


def test_of_twins_that_reach_as_far_the_one_of_the_higher_rank_is_found():
    index, marks = RunIndex(), marks_of([1, 2, 3])
    for length in (3, 2, 2):
        index.add(Run(marks[: 8 * length]))
    shorter = list(index.twins(marks[:8]))[:2]
    path, ends, _ = index.path(marks[:16], 4, lambda run: run, rank=lambda run: run is shorter[1])
    assert (path, ends) == ([shorter[1]], [2])


def test_a_removed_run_is_found_no_more_wherever_it_stands_among_its_twins():
    marks = marks_of([1, 2, 3])
    for gone in range(3):
        index, runs = RunIndex(), [Run(marks[: 8 * length]) for length in (1, 2, 3)]
        for run in runs:
            index.add(run)
        index.remove(runs[gone])
        assert set(index.twins(marks[:8])) == {*runs} - {runs[gone]}
        assert index.path(marks, 4, lambda run: run)[1] == ([3] if gone != 2 else [2])


def test_a_long_prompt_costs_a_look_for_each_run_and_not_more():
    index, tokens = RunIndex(), list(range(4000))
    marks = marks_of(tokens)
    for start in range(0, 4000, 8):
        index.add(Run(marks[8 * start : 8 * start + 64]))
    looks = []
    assert index.path(marks, 8, lambda run: looks.append(run) or run)[1] == list(range(8, 4001, 8))
    assert len(looks) == 500
