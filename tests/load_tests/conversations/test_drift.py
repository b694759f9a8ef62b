"""The measurement of re-tokenized answers: what it samples, and what it finds."""

from __future__ import annotations

import json
from random import Random

import pytest
import typer
from typer.testing import CliRunner

from load_tests.conversations import drift, sampled, templates


@pytest.fixture(scope="module")
def models() -> dict[str, templates.Model]:
    return {model.name: model for model in templates.models()}


@pytest.mark.parametrize("name", ["demo", "chatml"])
def test_split_tokens_have_the_same_text(models: dict[str, templates.Model], name: str):
    model = models[name]
    text = " ".join(model.words[:200])
    plain = drift.sampled(model, text, 0.0, Random(1))
    split = drift.sampled(model, text, 0.2, Random(1))
    assert len(split) > len(plain)
    decoded = [model.backend.decode(ids, skip_special_tokens=False) for ids in (plain, split)]
    assert decoded[0] == decoded[1] == text


def test_what_is_lost_is_what_the_next_prompt_does_not_begin_with():
    assert drift.common([1, 2, 3], [1, 2, 4, 5]) == 2
    assert drift.common([1, 2], [1, 2, 3]) == 2
    assert drift.common([1], []) == 0


def test_splicing_loses_nothing_where_texts_come_back_and_nothing_helps_where_they_do_not(
    models: dict[str, templates.Model],
):
    split = drift.run(models["chatml"], drift.Case("chatml", "text", 100, 0.05), 2, 4)
    assert split.lost > 10
    assert split.lost_spliced == 0
    assert split.outcomes["spliced"] > 0
    stripped = drift.run(models["thinking"], drift.Case("thinking", "thinking", 100, 0.0), 2, 4)
    assert stripped.lost == stripped.lost_spliced > 10
    assert stripped.outcomes == {"template": 6}
    calls = drift.run(models["tools"], drift.Case("tools", "spaceless call", 40, 0.0), 2, 4)
    assert calls.outcomes == {"tool_call": 6}


def test_the_program_prints_a_table_and_writes_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drift, "cases", lambda: [drift.Case("demo", "text", 50, 0.01)])
    app = typer.Typer()
    app.command()(drift.main)
    run = CliRunner().invoke(app, ["--conversations", "1", "--turns", "2", "--json", "-"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["rows"][0]["next_turns"] == 1


def test_the_table_of_servers_has_the_ratio_of_each_pair():
    row = {
        "arm": "never", "next_turns": 4, "known_tokens": 500.0, "extra_tokens": 80.0, "losing_share": 0.5,
        "seconds": 2.0, "outcomes": {"retokenized": 2},
    }  # fmt: skip
    text = sampled.table([row, {**row, "arm": "auto", "extra_tokens": 9.0, "seconds": 1.0, "outcomes": {}}])
    assert "auto / never: 0.50" in text
