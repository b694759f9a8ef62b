"""The benchmark runs every kernel, compares it with a copy of as many bytes, and names what falls short."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from kernels.benchmark import __main__ as command
from kernels.benchmark import codec_cases, paged_cases
from kernels.benchmark.measuring import Case, Target, measure
from kernels.paged.layout import LayoutKind, PagedLayout

ALL = {*command.FAMILIES}


def clock_of(seconds):
    """A clock that says what ``seconds`` has for an operation, in turn, and runs it."""

    def clock(operation):
        operation()
        return seconds[operation].pop(0)

    return clock


def case(target, log=None, unit="GB/s"):
    log = [] if log is None else log
    return Case("gather", "a kernel", 2 * 10**9, 4, lambda: log.append("run"), lambda: log.append("copy"), unit, target)


def test_kernel_and_copy_take_turns_after_one_of_each_that_is_not_counted():
    log = []
    one = case(None, log)
    row = measure(one, 2, clock_of({one.run: [2.0, 4.0], one.copy: [1.0, 1.0]}))
    assert log == ["copy", "run"] * 3
    assert row.rates == [1.0, 0.5]
    assert row.copy_gb_per_s == [2.0, 2.0]
    assert row.ratios == [0.5, 0.25]
    assert row.microseconds_per_call == pytest.approx(3.0e6 / 4)


@pytest.mark.parametrize(
    ("target", "unit", "missed"),
    [
        (None, "GB/s", None),
        (Target("rate", 0.5), "GB/s", None),
        (Target("rate", 0.6), "GB/s", "a kernel: 0.50 GB/s, less than 0.6"),
        (Target("ratio", 0.25), "GB/s", None),
        (Target("ratio", 0.3), "GB/s", "a kernel: 0.25 of memcpy, less than 0.3"),
        (Target("rate", 501), "M symbols/s", "a kernel: 500.00 M symbols/s, less than 501"),
    ],
)
def test_what_falls_short_of_its_target_is_a_sentence(target, unit, missed):
    one = case(target, unit=unit)
    times = clock_of({one.run: [4.0, 4.0, 1.0], one.copy: [1.0, 1.0, 1.0]})
    assert measure(one, 3, times).missed == missed  # of the medians: one quick run does not make up for it


def test_every_target_of_the_issue_is_set():
    wanted = {"gather": ("ratio", 0.5), "scatter": ("ratio", 0.5), "dequantize": ("rate", 4.0), "decode": ("rate", 250)}
    small = [*paged_cases.paged_cases(ALL, 1), *codec_cases.codec_cases(ALL, 1, 1)]
    for one in small:
        kernel = one.name.split(",")[0]
        expected = None if one.name.endswith("a layer a call") else wanted.get(kernel)
        assert one.target == (Target(*expected) if expected else None), one.name
    assert {one.family for one in small} == ALL


def test_a_run_moves_every_segment_whether_whole_or_layer_by_layer():
    layout = PagedLayout(LayoutKind.CPU_AMX, 32, 2, 64, torch.bfloat16)
    placements = paged_cases.place(paged_cases.MODELS[0], layout, 3 * 786432)
    for number, layer in enumerate(placements.layers):
        layer.copy_(torch.arange(len(layer)).view(-1, 1, 1, 1) + 100 * number)
    paged_cases.move_all(paged_cases.gather, placements, 6)
    whole = [segment.clone() for segment in placements.segments]
    assert len(whole) == 3
    for segment in placements.segments:
        segment.zero_()
    paged_cases.move_all(paged_cases.gather, placements, 1)
    assert all(torch.equal(a, b) and a.any() for a, b in zip(whole, placements.segments, strict=True))


@pytest.fixture
def small(monkeypatch):
    """The whole command on a few segments, on the CPU."""
    monkeypatch.setattr(command, "paged_cases", lambda families: paged_cases.paged_cases(families, 1))
    monkeypatch.setattr(command, "codec_cases", lambda families: codec_cases.codec_cases(families, 1, 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    app = typer.Typer()
    app.command()(command.main)
    yield lambda *arguments: CliRunner().invoke(app, list(arguments))
    torch.set_num_threads(threads)


def test_the_command_reports_every_kernel_and_exits_with_0_whatever_was_missed(small, monkeypatch):
    monkeypatch.setattr(codec_cases, "DECODE_TARGET", Target("rate", 1e9))
    result = small("--json", "-", "--repetitions", "1")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert {row["family"] for row in report["rows"]} == ALL
    assert all(row["rates"][0] > 0 and row["copy_gb_per_s"][0] > 0 for row in report["rows"])
    assert any(sentence.startswith("decode, rANS") for sentence in report["missed"])
    assert "falls short: decode, rANS" in result.stderr


def test_only_the_kernels_asked_for_are_measured_and_an_unknown_one_is_refused(small, tmp_path):
    path = tmp_path / "out.json"
    result = small("--only", "rope,rans", "--repetitions", "1", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert {row["family"] for row in json.loads(path.read_text())["rows"]} == {"rope", "rans"}
    assert "shift of keys" in result.stdout
    assert "gather" not in result.stdout
    refused = small("--only", "sort")
    assert refused.exit_code == 2
    assert "gather" in refused.output
