"""The codec table's arithmetic, and a profile that is measured on a tiny model: what is sensitive gets finer steps."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from deployments.segment_store.codec_files import find_profile, model_digest, profile_path
from kernels.codecs import CodecProfile
from kernels.codecs.step_plan import entropy_and_error, normal_histogram
from load_tests.codec import profile as profile_codec
from load_tests.codec import profile_measure
from load_tests.codec import table as codec_table
from load_tests.codec.arms import all_arms
from load_tests.codec.model import continued, divergence, kv_shape, prefix_kv
from load_tests.codec.profile import PROFILE_SEED, demo_samples, make_profile, text_samples
from load_tests.codec.profile_measure import FACTORS, Distributions, Sample, layer_groups, level_factors
from load_tests.codec.questions import DEMO, DEMO_PROFILE, Conversation, ask, conversations, judge
from load_tests.codec.table import SEED, demo_profile, demo_table, missed, plot, random_ids, wide_model, wide_table


@pytest.fixture(scope="module")
def tiny() -> Any:
    """Two layers of the wide model's kind."""
    return wide_model(layers=2)


def row(codec: str, ratio: float, **changed: Any) -> dict[str, Any]:
    """A row of the demo table that falls short of nothing."""
    fine = {
        "codec": codec, "times_smaller_than_bf16": ratio, "bits_per_element": 16 / ratio, "encode_mb_per_s": 100.0,
        "decode_mb_per_s": 500.0, "lost": 0, "gained": 0, "tokens_changed": 0, "tokens": 5000, "kl": 0.0,
    }  # fmt: skip
    if codec.startswith("cachegen"):
        fine["bits_over_tables_entropy"] = 0.004
    return fine | changed


ROWS = [
    row("lossless", 1.45), row("cachegen 1", 5), row("cachegen 2", 7), row("cachegen 3", 9.5),
]  # fmt: skip
EXACT = {
    "questions": 550, "right": 520,
    "arithmetic": {"lost": 1, "gained": 2, "tokens_changed": 3, "tokens": 5000, "kl": 1e-5},
}  # fmt: skip
SPEEDS = {"recompute_tokens_per_s": 100.0, "decode_tokens_per_s": {name["codec"]: 5000.0 for name in ROWS}}


def test_nothing_falls_short_where_all_is_reached() -> None:
    assert missed(ROWS, EXACT, SPEEDS) == []


@pytest.mark.parametrize(
    ("number", "changed", "says"),
    [
        (0, {"times_smaller_than_bf16": 1.2}, "lossless is 1.20 times"),
        (0, {"kl": 1e-9}, "lossless is not"),
        (1, {"lost": 2, "gained": 1}, "level 1 loses 2 answers and gains 1"),
        (2, {"lost": 11, "gained": 1}, "level 2 loses 1.8%"),
        (2, {"kl": 0.02}, "level 2 has a KL"),
        (2, {"bits_over_tables_entropy": 0.05}, "level 2 takes 5.0% more bits"),
        (3, {"times_smaller_than_bf16": 8.0}, "cachegen 3 is 8.00 times"),
    ],
)
def test_what_falls_short_is_said(number: int, changed: dict[str, Any], says: str) -> None:
    rows = [one | changed if index == number else one for index, one in enumerate(ROWS)]
    (sentence,) = missed(rows, EXACT, SPEEDS)
    assert says in sentence


def test_decoding_that_is_not_much_faster_than_recomputing_is_said() -> None:
    slow = SPEEDS | {"recompute_tokens_per_s": 1000.0}
    assert "5.0 times as fast" in missed(ROWS, EXACT, slow)[0]


def test_tables_and_plot_hold_every_codec(tmp_path: Path) -> None:
    demo, wide = demo_table(ROWS, EXACT), wide_table(ROWS, SPEEDS)
    assert all(table.count(f"| {one['codec']} |") == 1 for table in (demo, wide) for one in ROWS)
    assert "| cachegen 2 | 7.00 | 2.29 |" in demo
    assert "| 521/550 | 1, 2 | 0.00001 | 3/5000 |" in demo
    plot(ROWS, EXACT, tmp_path / "codecs.png")
    assert (tmp_path / "codecs.png").stat().st_size > 1000


def test_a_conversation_from_its_own_kv_is_answered_as_it_was_and_from_noise_it_is_not(tmp_path: Path) -> None:
    from load_tests.codec.model import load_model

    model = load_model(DEMO)
    profile = demo_profile()
    one = ask(model, next(conversations(1, 77)))
    arms = all_arms(profile)
    lossless = judge(model, one, arms[0].through(one.kv))
    assert sum(one.right) >= 8
    assert (lossless.lost, lossless.gained) == (0, 0)
    assert float(lossless.divergences.max()) == 0
    assert lossless.same_tokens == len(lossless.divergences)
    noise = judge(model, one, torch.randn_like(one.kv))
    assert noise.lost - noise.gained > 3
    assert arms[0].row()["times_smaller_than_bf16"] > 1.3


def test_kv_of_a_prefix_continues_as_the_whole_does(tiny: Any) -> None:
    ids = random_ids(48, 1)
    whole = tiny(torch.tensor([ids])).logits[0, 32:]
    assert float(divergence(whole, continued(tiny, prefix_kv(tiny, ids[:32]), ids[32:])).max()) < 1e-3


def tinys_profile(tiny: Any) -> tuple[CodecProfile, dict[str, Any]]:
    """A profile of the tiny model, measured on two prompts, and what was measured."""
    ids = [random_ids(128, number) for number in range(2)]
    return make_profile(tiny, [Sample(one[:96], one[96:]) for one in ids], 1, b"tiny" * 4)


@pytest.fixture(scope="module")
def measured(tiny: Any) -> tuple[CodecProfile, dict[str, Any]]:
    return tinys_profile(tiny)


def test_a_measured_profile_is_for_that_model_and_codes_it_smaller_than_the_generic_one(
    tiny: Any, measured: tuple[CodecProfile, dict[str, Any]]
) -> None:
    profile, report = measured
    profile.check(kv_shape(tiny), b"tiny" * 4)
    assert CodecProfile.from_bytes(profile.to_bytes()).digest == profile.digest
    assert report["levels"][1]["bits"] > report["levels"][2]["bits"] >= report["levels"][3]["bits"]
    kv = prefix_kv(tiny, random_ids(256, 9))
    arm = all_arms(profile)[-1]
    arm.through(kv)
    assert 0 <= arm.row()["bits_over_tables_entropy"] < 0.05


class _Probe:
    """KL is each tensor's own weight times its mean squared error."""

    weights = np.array([[1.0, 0.01], [0.04, 0.0001]])

    def divergence(self, factors: np.ndarray) -> float:
        counts = normal_histogram()
        errors = [entropy_and_error(counts, factor)[1] if factor else 0.0 for factor in factors.reshape(-1)]
        return float(self.weights.reshape(-1) @ np.array(errors))


def _normal_halves() -> Any:
    """Two layers whose K and V are all distributed normally."""
    halves, moments = [[normal_histogram()] * 2] * 2, torch.zeros(2, 2, 1)
    return Distributions(moments, moments, halves, halves, halves)


def test_the_more_sensitive_the_finer_and_the_size_is_kept() -> None:
    probe: Any = _Probe()
    found = _normal_halves()
    measured = profile_measure.sensitivities(probe, found, lambda: None)
    assert np.allclose(measured, probe.weights)
    for bits in (4.0, 2.5):
        factors = level_factors(found, measured, bits)
        assert list(np.argsort(factors.reshape(-1))) == [0, 2, 1, 3]
        taken = np.mean([entropy_and_error(normal_histogram(), factor)[0] for factor in factors.reshape(-1)])
        assert bits - 0.25 < taken <= bits  # one of four tensors can go from 1/16 to 1/8 at once
    assert (level_factors(found, measured, 100.0) == FACTORS[0]).all()
    assert (level_factors(found, measured, 0.0) == FACTORS[-1]).all()


def test_equal_steps_of_that_size_have_twice_the_divergence() -> None:
    probe: Any = _Probe()
    best = level_factors(_normal_halves(), probe.weights, 2.5)
    same_size = np.full((2, 2), 0.75)  # 2.495 bits each
    assert probe.divergence(best) < 0.5 * probe.divergence(same_size)


def test_wider_steps_take_fewer_bits_and_err_by_a_twelfth_of_their_square() -> None:
    counts = normal_histogram()
    bits, errors = zip(*[entropy_and_error(counts, factor) for factor in (0.125, 0.25, 0.5)], strict=True)
    assert np.allclose(np.diff(bits), -1, atol=0.02)
    assert np.allclose(errors, np.array([0.125, 0.25, 0.5]) ** 2 / 12, rtol=0.03)


def _stated(samples: Sequence[Sample | Conversation]) -> set[str]:
    """Sentences of the prompts' documents about homes, jobs and owners."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)
    text = " ".join(tokenizer.decode(one.prefix) for one in samples)
    return set(re.findall(r"\w+ lives in \w+|\w+ is an? \w+|\w+ \w+ belongs to \w+", text))


def test_a_profile_is_made_of_conversations_that_share_no_fact_and_no_prompt_with_any_held_out_questions() -> None:
    shared_seed = 12
    for seed in (PROFILE_SEED, shared_seed):
        made_of = demo_samples(12, seed)
        judged_on = [one for other in (SEED, shared_seed) for one in conversations(66, other)]
        assert len(_stated(made_of)) > 200 < len(_stated(judged_on))
        assert _stated(made_of).isdisjoint(_stated(judged_on))
        assert {tuple(one.prefix) for one in made_of}.isdisjoint(tuple(one.prefix) for one in judged_on)


def test_the_same_prompts_make_the_same_profile_and_a_seed_other_prompts(
    tiny: Any, measured: tuple[CodecProfile, dict[str, Any]]
) -> None:
    again, _ = tinys_profile(tiny)
    assert again.to_bytes() == measured[0].to_bytes()
    assert demo_samples(2, 1) == demo_samples(2, 1) != demo_samples(2, 2)


def test_every_layer_is_in_one_group() -> None:
    for layers in (1, 6, 12, 24, 80):
        groups = layer_groups(layers)
        assert [layer for group in groups for layer in group] == list(range(layers))


def test_the_committed_profile_is_the_demo_models_and_has_finer_steps_where_it_is_sensitive() -> None:
    profile = demo_profile()
    profile.check((6, 2, 64), model_digest(str(DEMO)))
    for level in range(3):
        shallow, deep = (
            np.mean([half.plans[level].factor for layer in layers for half in profile.halves[layer]])
            for layers in ((1, 2), (4, 5))
        )
        assert shallow < deep


def test_the_server_finds_a_profile_where_the_maker_puts_it_or_beside_the_model(tmp_path: Path) -> None:
    model, made = tmp_path / "model", tmp_path / "made"
    made.mkdir()
    shutil.copytree(DEMO, model, ignore=shutil.ignore_patterns(DEMO_PROFILE.name))
    assert find_profile(str(made), str(model)) is None
    profile_path(str(made), str(model)).write_bytes(DEMO_PROFILE.read_bytes())
    for folder, where in ((made, model), (tmp_path / "nowhere", DEMO)):
        found = find_profile(str(folder), str(where))
        assert found is not None
        assert found.digest == demo_profile().digest


def test_too_short_a_text_and_an_unknown_model_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a profile needs"):
        text_samples(str(DEMO), "Anna lives in Paris.", 2)
    app = typer.Typer()
    app.command()(profile_codec.main)
    result = CliRunner().invoke(app, ["--model", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "no folder" in " ".join(result.output.replace("│", " ").split())


def test_the_report_is_json(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        codec_table, "measure_demo", lambda questions, seed: (ROWS, EXACT | {"asked": (questions, seed)})
    )
    app = typer.Typer()
    app.command()(codec_table.main)
    target, picture = tmp_path / "report.json", tmp_path / "plot.png"
    arguments = ["--wide-layers", "0", "--seed", "5", "--json", str(target), "--plot", str(picture)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(target.read_text())
    assert report["falls_short"] == []
    assert report["seed"] == report["bf16"]["asked"][1] == 5
