"""Times to the first token beside the table of quality: measured in turns, kept in a file, shown by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from load_tests.experiments.engines.tiered import CODECS
from load_tests.quality import first_tokens
from load_tests.quality.first_tokens import ALIKE, BLENDED, STORED, FirstTokens, measured, read_first_tokens


class FakeEngine:
    """A prefill takes a second; what comes back from Redis a tenth of one, a blend a quarter."""

    def __init__(self, reused: float = 0.9) -> None:
        self.calls: list[str] = []
        self.reused = reused

    def call(self, method: str, tokens: int, codec: str = BLENDED, **_: Any) -> Any:
        self.calls.append(codec)
        if method == "blend":
            return {"none": 2.0, "blended": 0.5}
        return {"none": {"ttft_s": 1.0}, "redis": {"ttft_s": 0.1, "reused": self.reused * tokens}}


def test_every_form_takes_its_turn_in_each_round_and_the_first_round_does_not_count() -> None:
    engine = FakeEngine()
    ratios = measured(engine, 2, 0, lambda: None)
    arms = len(STORED) + 1
    rounds = [engine.calls[at : at + arms] for at in range(0, len(engine.calls), arms)]
    assert len(rounds) == 3
    assert all(set(one) == {*STORED.values(), BLENDED} for one in rounds)
    assert rounds[1] != rounds[2]
    assert set(STORED.values()) <= set(CODECS)
    assert ratios == {**{name: [0.1, 0.1] for name in STORED}, BLENDED: [0.25, 0.25]}


def test_what_redis_did_not_give_is_no_time() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        measured(FakeEngine(reused=0.5), 1, 0, lambda: None)


def test_a_cell_is_its_rows_own_or_says_that_it_is_about_anothers() -> None:
    found = FirstTokens("a machine", {"sparse 50": [0.1, 0.2, 0.4], BLENDED: [0.25]})
    assert found.words("sparse 50") == "0.200"
    assert found.words("sparse layers") == "~ 0.200"
    assert found.words("blended, check layer 2, ratio 0.1") == "0.250"
    assert found.words("blended, as many random tokens") == found.words("whole prefill") == ""
    assert set(ALIKE.values()) <= set(STORED)


def test_the_latest_result_is_read_and_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_tokens, "FILE", tmp_path / "none.json")
    assert read_first_tokens() is None
    file = tmp_path / "found.json"
    file.write_text('{"setting": "a machine", "ratios": {"lossless": [0.1]}}')
    assert read_first_tokens(file) == FirstTokens("a machine", {"lossless": [0.1]})
    for text in ('{"other": 1}', "[1]", "no json"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"json|Expecting|result"):
            read_first_tokens(file)
