"""A blend part by part: what is kept of it, its table and its picture."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
from matplotlib.figure import Figure

from deployments.engine.load_paths.blending.job import BlendParts
from load_tests.micro.blend.report import PAGE
from load_tests.micro.blend.waterfall import BEGIN, END, FULL, PARTS, Prompts, Waterfall, draw, waterfall_table


def waterfalls() -> dict[str, Waterfall]:
    full, blend = Waterfall(), Waterfall()
    for ttft_s in (8.0, 10.0):
        full.add(ttft_s, {})
        parts = dict.fromkeys(PARTS, 0.1) | {"selective_s": 1.0}
        blend.add(ttft_s / 4, parts)
    return {FULL: full, "check layer 2": blend}


def test_what_no_part_has_is_the_rest() -> None:
    one = waterfalls()["check layer 2"]
    assert one.parts["rest"] == pytest.approx([2.0 - 1.6, 2.5 - 1.6])
    assert sum(values[0] for values in one.parts.values()) == pytest.approx(one.ttft_s[0])


def test_a_waterfall_has_a_line_for_each_part_and_a_bar_for_each_arm() -> None:
    found = waterfalls()
    page = waterfall_table(found)
    assert "| other layers, chosen rows |  | 1000 / 1000 / 1000 |" in page
    assert page.splitlines()[-1] == "| ÷ full prefill | 1.000 / **1.000** / 1.000 | 0.250 / **0.250** / 0.250 |"
    figure = Figure()
    draw(found, figure)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["check layer 2", FULL]
    ends = [max(bar.get_x() + bar.get_width() for bar in bars) for bars in zip(*axes.containers, strict=True)]
    assert ends == pytest.approx([2250.0, 9000.0])


def test_the_parts_are_those_that_a_blend_keeps() -> None:
    seconds = [one.name for one in fields(BlendParts) if one.name.endswith("_s") and not one.name.startswith("longest")]
    assert list(PARTS) == seconds


def test_prompts_of_tokens_say_where_their_documents_stand() -> None:
    prompts = Prompts(0)
    documents = [prompts.drawn((5, 9)) for _ in range(4)]
    tokens, chunks = prompts.prompt(documents)
    assert sorted(tokens[chunk.start : chunk.stop] for chunk in chunks) == sorted(documents)
    assert all(one.stop == other.start for one, other in itertools.pairwise(chunks))
    assert chunks[0].start > 0
    assert prompts.prompt(documents)[0][:8] != tokens[:8]


def test_the_projects_page_has_a_place_for_the_parts() -> None:
    whole = PAGE.read_text()
    assert whole.index(BEGIN) < whole.index(END)
