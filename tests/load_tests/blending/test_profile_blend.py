"""Calibration of blending: prompts are read and cut as the server does, the smallest layer and ratio are chosen."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from configs.blending import BLEND_PROFILE_FILE, read_blend_profile
from configs.settings import PROJECT_ROOT
from load_tests.blending import profile
from load_tests.blending.profile import Point, choose, divergences, table
from load_tests.blending.prompts import read_prompts, special_marks
from load_tests.measuring.program import InputError

PROBE = PROJECT_ROOT / "models" / "probe"
HOMES = "Anna lives in Paris. Ben lives in Oslo. Anna is a baker. Ben has a dog. "
THINGS = "The red ball belongs to Anna. The blue box belongs to Ben. "


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(PROBE)


def chat(question: str = "Where is the red ball?") -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "documents": [{"text": HOMES * 4}, {"text": THINGS * 4}],
    }


def lines(folder: Path, *prompts: object) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in prompts) + "\n")
    return file


def test_the_templates_document_token_separates_and_other_special_tokens_end(tokenizer: Any) -> None:
    separators, ends = special_marks(tokenizer)
    assert tokenizer.convert_ids_to_tokens(separators) == ["<|doc|>"]
    assert tokenizer.get_vocab()["<|end|>"] in ends


def test_chats_and_texts_are_read_and_those_without_chunks_counted(tmp_path: Path, tokenizer: Any) -> None:
    text = f"<|bos|><|doc|> {HOMES * 4}<|end|> Where?"
    file = lines(tmp_path, chat() | {"answer": " The red ball city is Paris."}, "", {"prompt": text}, {"prompt": "Hi"})
    (first, second), without = read_prompts(file, tokenizer, [], 32, 10)
    assert without == 1
    assert len(first.chunks) == 2
    assert tokenizer.decode(first.answer) == " The red ball city is Paris."
    assert [tokenizer.decode(second.ids[slice(*chunk)]) for chunk in second.chunks] == [f"<|doc|> {HOMES * 4}"]
    assert len(read_prompts(file, tokenizer, [], 32, 1)[0]) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is not JSON"),
        ([1], 'either "messages" or "prompt"'),
        ({"prompt": "a", "messages": []}, 'either "messages" or "prompt"'),
        ({"prompt": 3}, "are texts"),
        ({"messages": 7}, "refuses these messages"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, tokenizer: Any, line: object, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_prompts(lines(tmp_path, chat(), line), tokenizer, [], 32, 10)


def test_prompts_without_any_chunk_say_what_one_begins_with(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"begins with '<\|doc\|>'"):
        read_prompts(lines(tmp_path, {"prompt": "Hi"}), tokenizer, [], 32, 10)


def points(kl: dict[tuple[int, float], float]) -> list[Point]:
    return [Point(layer, ratio, value, value) for (layer, ratio), value in kl.items()]


def test_the_smallest_layer_within_the_target_is_chosen_and_there_the_smallest_ratio() -> None:
    found = points({(0, 0.0): 0.0, (1, 0.3): 0.01, (2, 0.1): 0.003, (2, 0.15): 0.002, (2, 0.3): 0.001, (3, 0.05): 0.0})
    chosen = choose(found, 0.002)
    assert chosen is not None
    assert (chosen.check_layer, chosen.ratio) == (2, 0.15)
    assert choose(found[:3], 0.002) is None
    assert "| naive reuse | 0 | 0.00000 | 0.00000 |  |" in table(found, chosen)
    assert "| 2 | 0.15 | 0.00200 | 0.00200 | chosen |" in table(found, chosen)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, float], float]:
    """What the command measures, in place of measuring it."""
    found = {(0, 0.0): 1.0, (1, 0.05): 0.5, (2, 0.05): 0.003, (2, 0.1): 0.0007}
    monkeypatch.setattr(profile, "measure", lambda *_: points(found))
    return found


def command(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(profile.main)
    return CliRunner().invoke(app, [*arguments, "--min-chunk-tokens", "32", "--model", str(PROBE)])


def test_what_is_chosen_is_written_where_the_server_reads_it(tmp_path: Path, measured: Any) -> None:
    result = command("--data", str(lines(tmp_path, chat())), "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    written = read_blend_profile(tmp_path)
    assert written is not None
    assert (written.check_layer, written.recompute_ratio, written.kl, written.prompts) == (2, 0.1, 0.0007, 1)
    assert set(written.versions) == {"torch", "transformers"}
    assert stat.S_IMODE((tmp_path / BLEND_PROFILE_FILE).stat().st_mode) == 0o644


def test_nothing_within_the_target_writes_nothing_and_ends_with_one(tmp_path: Path, measured: Any) -> None:
    result = command("--data", str(lines(tmp_path, chat())), "--out", str(tmp_path), "--kl", "0.0001")
    assert result.exit_code == 1
    assert "nothing is written" in " ".join(result.output.split())
    assert not (tmp_path / BLEND_PROFILE_FILE).exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, measured: Any) -> None:
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")
    result = command("--data", str(lines(tmp_path, chat())), "--out", str(not_a_folder))
    assert result.exit_code == 2
    assert str(not_a_folder / BLEND_PROFILE_FILE) in result.output


def test_a_real_prompt_loses_at_layer_one_and_nothing_at_layer_two(tmp_path: Path, tokenizer: Any) -> None:
    model = profile.load_model(PROBE)
    (prompt,), _ = read_prompts(lines(tmp_path, chat()), tokenizer, [], 32, 1)
    case = profile.case_of(model, prompt, 16)
    assert tokenizer.decode(case.answer, skip_special_tokens=True) == " The red ball city is Paris."
    naive, whole, blended = divergences(model, case, [(0, 0.0), (1, 1.0), (2, 0.15)])
    assert whole < 1e-6
    assert blended < 0.1 * naive
