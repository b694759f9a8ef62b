import contextlib
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import typer
import yaml

from load_tests.bench import __main__ as program
from load_tests.bench import measure as measuring
from load_tests.bench import resources
from load_tests.bench.arms import ARMS, BASE, EXACT, crosskv_settings, rotated
from load_tests.bench.balance import added, by_metrics, by_usage, variation
from load_tests.bench.cases import Case, parameters_of
from load_tests.bench.choice import Choice, InputError, writable
from load_tests.bench.figures import figures, percentile
from load_tests.bench.journal import Journal
from load_tests.bench.plan import Key, Plan, Sizes
from load_tests.bench.plots import draw
from load_tests.bench.report import BEGIN, END, as_json, closing, markdown, write_docs
from load_tests.bench.summary import rows, verdicts
from load_tests.harness.client import Measured, ServerError
from load_tests.peers.engine import Peer
from load_tests.workloads import WORKLOADS, Words, long_document_qa, working_set_tokens

WORDS = Words(lambda text: len(text.split()))


def one(number, ttft_s=1.0, *, returning=False, error=None, kv_cache=None, cached=0, sent_s=0.0, ended_s=2.0):
    return Measured(number, returning, sent_s, ttft_s, 0.1, ended_s, 100, 10, cached, kv_cache, error)


def from_tiers(replica="0", **tokens):
    reused = {"device": 0, "cpu": 0, "redis": 0} | tokens
    return reused | {"recomputed": 100 - sum(reused.values()), "replica": replica}


def key(arm=EXACT, alternation=0, working_set=1.5, workload="qa"):
    return Key("365m", alternation, arm, workload, working_set)


def measurement(ttft_s, tokens_per_s=10.0, balance=0.1):
    found = figures([one(0, ttft_s), one(1, ttft_s, returning=True)], balance, 5.0, 1 << 30).as_dict()
    return found | {"output_tokens_per_s": tokens_per_s}


# From requests to figures


def test_returning_and_cold_prompts_are_told_apart():
    found = figures([one(0, 4.0), one(1, 1.0, returning=True), one(2, 2.0, returning=True)], None, 0.0, 0)
    assert (found.ttft_cold.mean, found.ttft_returning.mean) == (4.0, 1.5)
    assert found.ttft.count == 3
    assert found.ttft.mean == pytest.approx(7 / 3)


def test_throughput_is_over_the_time_from_the_first_request_to_the_last_answer():
    found = figures([one(0, sent_s=1.0, ended_s=2.0), one(1, sent_s=2.0, ended_s=5.0)], None, 0.0, 0)
    assert found.output_tokens_per_s == 20 / 4.0


def test_failed_requests_are_counted_and_left_out_of_everything_else():
    found = figures([one(0, 1.0), replace(one(1), error="503", ttft_s=None)], None, 0.0, 0)
    assert (found.requests, found.errors, found.error) == (2, 1, "503")
    assert (found.ttft.count, found.prompt_tokens, found.output_tokens) == (1, 100, 10)


def test_tokens_are_recomputed_or_come_from_a_tier():
    found = figures(
        [one(0, kv_cache=from_tiers(device=10, cpu=20)), one(1, kv_cache=from_tiers(redis=30))], None, 0.0, 0
    )
    assert found.reuse == {"device": 10, "cpu": 20, "redis": 30}
    assert found.recomputed_tokens == 200 - 60


def test_a_server_without_tiers_reuses_from_its_device():
    found = figures([one(0, cached=64)], None, 0.0, 0)
    assert found.reuse == {"device": 64, "cpu": 0, "redis": 0}
    assert found.recomputed_tokens == 36


def test_a_percentile_lies_between_its_neighbours():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.95) == 9.5
    assert percentile([7.0], 0.95) == 7.0


# Load balance


def test_a_replica_without_requests_counts():
    assert variation({"0": 5, "1": 5}, 2) == 0.0
    assert variation({"0": 10}, 2) == 1.0
    assert variation(None, 2) is None


def test_crosskv_says_who_answered():
    found = [one(number, kv_cache=from_tiers(replica)) for number, replica in enumerate("0010")]
    assert by_usage(found) == {"0": 3, "1": 1}


METRICS = """# TYPE ray_serve_deployment_request_counter counter
ray_serve_deployment_request_counter_total{deployment="LLMServer:40m",replica="a",route="/v1/chat/completions"} 3.0
ray_serve_deployment_request_counter_total{deployment="LLMServer:40m",replica="b",route="/v1/chat/completions"} 1.0
ray_serve_deployment_request_counter_total{deployment="LLMServer:40m",replica="b",route="/v1/models"} 9.0
ray_serve_deployment_request_counter_total{deployment="OpenAiIngress",replica="c",route="/v1/chat/completions"} 4.0
"""


def test_serve_counts_the_chat_requests_of_each_engine():
    assert by_metrics(METRICS) == {"a": 3, "b": 1}


def test_only_what_was_added_counts_and_only_if_it_is_all():
    assert added({"a": 3}, {"a": 5, "b": 2}, 4) == {"a": 2, "b": 2}
    assert added({"a": 3}, {"a": 5, "b": 2}, 5) is None
    assert added(None, {"a": 5}, 5) is None


# Arms


def test_every_arm_has_each_place_in_the_order_once():
    names = ["a", "b", "c"]
    orders = [rotated(names, number) for number in range(3)]
    assert all(sorted(at) == names for at in zip(*orders, strict=True))


@pytest.mark.parametrize("name", ["plain", BASE, "offloading", "lmcache"])
def test_peers_are_started_with_the_shared_sizes(name, tmp_path):
    words = ARMS[name].command(Peer("m", 8001, 3, 77, 999, "float32"), tmp_path, 8002)
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options["--dtype"] == "float32"
    assert options["--device-blocks"] == "77"
    assert options["--replicas"] == "3"
    assert options["--max-model-len"] == "999"
    assert (options["--port"], options["--metrics-port"]) == ("8001", "8002")


@pytest.mark.parametrize("name", [EXACT, "crosskv-compressed"])
def test_crosskv_is_started_with_the_shared_sizes_and_valid_settings(name, tmp_path):
    from configs.settings import load_settings

    words = ARMS[name].command(Peer("models/demo", 8001, 3, 77, 999, "float32"), tmp_path, 8002)
    assert words[-2:] == ["--port", "8001"]
    settings = load_settings(yaml.safe_load((tmp_path / "serve_config.yaml").read_text())["applications"][0]["args"])
    assert (settings.replicas, settings.device_blocks, settings.max_model_len) == (3, 77, 999)
    assert settings.dtype == "float32"
    assert settings.kv.redis_folder == str(tmp_path / "redis")
    assert settings.kv.fidelity == ("exact" if name == EXACT else "tolerant")


def test_the_compressed_arm_keeps_as_much_as_the_pools_in_the_cpu_tier(tmp_path):
    peer = Peer("models/demo", 8001, 2, 64, 999)
    exact, compressed = (crosskv_settings(peer, tmp_path, lossy)["kv"] for lossy in (False, True))
    assert "cpu_tier_bytes" not in exact
    assert compressed["cpu_tier_bytes"] == 2 * 64 * 6 * 2 * 2 * 64 * 2 * peer.settings().block_size_tokens


def test_arms_that_this_machine_cannot_run_say_why(monkeypatch):
    monkeypatch.setattr("configs.machine.accelerator", lambda: "cpu")
    assert "refuses the CPU backend" in ARMS["offloading"].unfit()
    assert "CPU backend" in ARMS["lmcache"].unfit()
    assert ARMS["plain"].unfit() is None
    monkeypatch.setattr("configs.machine.accelerator", lambda: "cuda")
    assert ARMS["offloading"].unfit() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install lmcache" in ARMS["lmcache"].unfit()
    monkeypatch.setattr("load_tests.bench.arms.missing_packages", lambda: ["pandas", "pyarrow"])
    assert "needs pandas and pyarrow" in ARMS[BASE].unfit()


# Workloads


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "conversation-trace"])
def test_a_workload_fits_the_model_and_comes_back_as_often_as_its_size_says(name):
    sizes = Sizes(device_blocks=64)
    chosen = parameters_of(name, sizes, 1.5, rate=1.0)
    made = WORKLOADS[name](random.Random(0), WORDS, **chosen)
    wanted = 1.5 * sizes.replicas * sizes.pool_tokens
    assert 0.6 * wanted < working_set_tokens(made) < 1.8 * wanted
    assert sum(request.returning for request in made.requests) >= 0.5 * len(made.requests)


# The command line


def choose(quick=False, **said):
    words = dict.fromkeys(("models", "arms", "workloads", "working_sets", "alternations", "device_blocks"))
    return Choice.made(
        **{**words, "replicas": 2, "dtype": None, "requests_per_s": None, "seed": 0, "quick": quick, **said}
    )


def test_lists_have_commas_between_their_words():
    plan = choose(models="10m, 40m", working_sets="0.5,3", arms=f"plain,{EXACT}").plan
    assert (plan.models, plan.working_sets, plan.arms) == (("10m", "40m"), (0.5, 3.0), ("plain", EXACT))


def test_quick_is_smaller_in_every_respect():
    quick, full = choose(quick=True), choose()
    assert (quick.name, full.name) == ("quick", "bench")
    assert len(quick.plan.keys()) < len(full.plan.keys())
    assert quick.plan.sizes.device_blocks < full.plan.sizes.device_blocks
    assert full.plan.alternations >= 3


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"models": "70b"}, "There is no model '70b'; choose of 10m, "),
        ({"arms": "sglang"}, "There is no arm 'sglang'"),
        ({"workloads": "qa"}, "There is no workload 'qa'"),
        ({"workloads": ","}, "No workload is named"),
        ({"working_sets": "big"}, "'big' are not numbers"),
        ({"working_sets": "0,1"}, "must be above zero"),
        ({"arms": "lmcache"}, "No arm is left"),
    ],
)
def test_what_cannot_be_is_one_sentence(said, sentence):
    with pytest.raises(InputError) as refused:
        choose(**said)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written to \(.*\); name another folder with --results"):
        writable(tmp_path / "file" / "results")


# What is kept


def test_a_measurement_is_kept_and_not_measured_again(tmp_path):
    journal = Journal(tmp_path / "new" / "bench.jsonl")
    journal.add(key(), figures([one(0)], 0.1, 1.0, 2), [one(0)])
    again = Journal(journal.path)
    assert again.figures == journal.figures
    assert again.missing([key(), key(alternation=1)]) == [key(alternation=1)]


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path):
    journal = Journal(tmp_path / "bench.jsonl")
    journal.add(key(), figures([one(0)], 0.1, 1.0, 2), [one(0)])
    text = journal.path.read_text()
    journal.path.write_text(text + text[:50])
    cut = Journal(journal.path)
    assert list(cut.figures) == [key()]
    cut.add(key(alternation=1), figures([one(0)], 0.1, 1.0, 2), [one(0)])
    assert len(Journal(journal.path).figures) == 2


def test_fresh_forgets(tmp_path):
    journal = Journal(tmp_path / "bench.jsonl")
    journal.add(key(), figures([one(0)], 0.1, 1.0, 2), [one(0)])
    journal.forget()
    assert Journal(journal.path).figures == {}


def test_other_sizes_are_other_measurements(monkeypatch):
    assert Sizes().digest() == Sizes().digest()
    assert Sizes(device_blocks=65).digest() != Sizes().digest()
    assert Sizes(seed=1).digest() != Sizes().digest()
    before = Sizes().digest()
    monkeypatch.setattr("configs.settings._DEFAULT_STEP_TOKENS", {"cpu": 64, "cuda": 64})
    assert Sizes().digest() != before


@pytest.fixture
def small_run(monkeypatch, tmp_path):
    """The whole program with servers that are not there: each request is answered at once."""
    said = {
        "models": "40m",
        "arms": f"{BASE},{EXACT},lmcache",
        "workloads": "long-document-qa",
        "working_sets": "0.5,1.5",
        "alternations": 2,
        "device_blocks": 64,
        "dtype": None,
        "requests_per_s": None,
        "seed": 0,
    }
    plan = choose(**said).plan
    workload = long_document_qa(random.Random(0), WORDS, documents=1, document_tokens=10, repeats=1)
    cases = [Case(workload, size) for size in plan.working_sets]
    served = []

    def one_server(plan, arm, wanted, journal, logs, port, start_s, title, watch):
        for wanted_key in wanted:
            if one_server.breaks_after == len(served):
                raise one_server.error
            served.append(wanted_key)
            journal.add(wanted_key, figures([one(0), one(1, returning=True)], 0.0, 1.0, 1), [])

    one_server.breaks_after, one_server.error = None, KeyboardInterrupt()
    monkeypatch.setattr(measuring, "cases_of", lambda *_: cases)
    monkeypatch.setattr(measuring, "_one_server", one_server)
    monkeypatch.setattr("load_tests.bench.arms.missing_packages", list)
    monkeypatch.setattr(program, "become_subreaper", lambda: None)
    monkeypatch.setattr(program, "draw", lambda *_: [])

    def run(**options):
        program.main(results=tmp_path, **{**said, "json_file": None, "port": None, **options})

    run.served, run.server, run.plan, run.folder = served, one_server, plan, tmp_path
    return run


def test_arms_alternate_and_every_measurement_is_made_once(small_run):
    small_run()
    assert [(entry.alternation, entry.arm) for entry in small_run.served[::2]] == [
        (0, BASE),
        (0, EXACT),
        (1, EXACT),
        (1, BASE),
    ]
    assert sorted(small_run.served) == sorted(small_run.plan.keys())
    assert json.loads((small_run.folder / "bench.json").read_text())["rows"]


def test_an_interrupted_run_goes_on_where_it_stopped(small_run, capsys):
    small_run.server.breaks_after = 3
    with pytest.raises(typer.Exit) as ended:
        small_run()
    assert ended.value.exit_code == 130
    assert "Interrupted: 3 of 8 kept; the same command goes on." in capsys.readouterr().err
    small_run.server.breaks_after = None
    small_run()
    assert sorted(small_run.served) == sorted(small_run.plan.keys())


def test_a_server_that_fails_ends_the_run_with_its_words_and_keeps_the_rest(small_run, capsys):
    small_run.server.breaks_after, small_run.server.error = 2, ServerError("The server ended with code 1.")
    with pytest.raises(typer.Exit) as ended:
        small_run()
    assert ended.value.exit_code == 2
    assert "The server ended with code 1." in capsys.readouterr().err
    small_run.server.breaks_after = None
    small_run()
    assert len(small_run.served) == 8


def test_the_json_can_go_to_stdout(small_run, capsys):
    small_run(json_file="-")
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 4


# The report


def measured_runs():
    return {
        key(BASE, 0): measurement(1.0, 10.0),
        key(BASE, 1): measurement(2.0, 20.0),
        key(BASE, 2): measurement(4.0, 10.0),
        key(EXACT, 0): measurement(0.1, 21.0),
        key(EXACT, 1): measurement(0.4, 44.0),
        key(EXACT, 2): measurement(0.4, 19.0),
    }


def test_ratios_are_of_one_alternation_and_spreads_over_all():
    base, ours = rows(measured_runs())
    spread = ours.ratios["ttft_returning_s"]
    assert (spread.least, spread.median, spread.most) == pytest.approx((0.1, 0.1, 0.2))
    assert ours.values["ttft_returning_s"].median == pytest.approx(0.4)
    assert base.ratios["ttft_returning_s"].median == 1.0


def test_an_alternation_that_one_arm_lacks_has_no_ratio():
    runs = measured_runs()
    del runs[key(BASE, 1)]
    ours = next(row for row in rows(runs) if row.arm == EXACT)
    assert ours.ratios["ttft_returning_s"].most == pytest.approx(0.1)
    assert ours.alternations == 3


def test_a_working_set_beyond_the_pools_has_two_targets_and_one_that_fits_another():
    runs = measured_runs()
    large = {verdict.target.figure: verdict.is_met for verdict in verdicts(rows(runs))}
    assert large == {"ttft_returning_s": True, "output_tokens_per_s": True}
    small = {replace(name, working_set=0.5): found for name, found in runs.items()}
    assert {verdict.target.figure: verdict.is_met for verdict in verdicts(rows(small))} == {"ttft_s": True}


@pytest.mark.parametrize(
    ("ttft_s", "tokens_per_s", "met"), [(0.15, 20.0, 2), (0.16, 20.0, 1), (0.15, 19.0, 1), (0.5, 10.0, 0)]
)
def test_a_target_is_judged_by_the_median_ratio(ttft_s, tokens_per_s, met):
    judged = verdicts(rows({key(BASE): measurement(1.0), key(): measurement(ttft_s, tokens_per_s)}))
    assert sum(verdict.is_met for verdict in judged) == met
    assert closing(judged) == ("All 2 targets are met." if met == 2 else f"{met} of 2 targets are met.")


def test_without_the_base_arm_nothing_is_judged():
    assert verdicts(rows({key(): measurement(0.1)})) == []
    assert "No target was judged" in closing([])


def test_a_small_model_is_not_judged_by_the_large_ones_targets():
    assert verdicts(rows({replace(name, model="40m"): found for name, found in measured_runs().items()})) == []


def test_the_table_has_every_arm_and_says_what_was_missed_and_skipped():
    runs = {key(BASE): measurement(1.0), key(): measurement(0.151, 30.0, balance=None)}
    found = rows(runs)
    text = markdown(found, verdicts(found), {"lmcache": "no connector"}, {"replicas": "2"})
    assert "**Missed**: 365m, qa, working set 1.5 x the pools: TTFT of returning prompts, mean is 0.151 (0.151 " in text
    assert "Met: 365m, qa, working set 1.5 x the pools: output tokens per second is 3 (" in text
    assert "Not run: plain vLLM with LMCache (no connector)." in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = table.splitlines()
        assert len(lines) == 2 + len(found)
        assert len({line.count("|") for line in lines}) == 1
    assert " n/a " in text


def test_the_json_names_its_figures_and_holds_the_verdicts():
    found = rows(measured_runs())
    plan = Plan(("40m",), (BASE, EXACT), ("qa",), (1.5,), 3, Sizes())
    document = json.loads(json.dumps(as_json(plan, found, verdicts(found), {}, {})))
    assert set(document["rows"][0]["values"]) == set(document["figures"])
    assert [target["met"] for target in document["targets"]] == [True, True]


def test_the_docs_get_the_table_between_their_marks(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_docs(page, "new")
    write_docs(page, "newer")
    assert page.read_text() == f"before\n{BEGIN}\n\nnewer\n{END}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no place for the results"):
        write_docs(page, "new")


def test_the_projects_page_has_a_place_for_the_results():
    whole = program.DOCS.read_text()
    assert whole.index(BEGIN) < whole.index(END)


def test_a_picture_is_drawn_for_each_quantity(tmp_path):
    found = rows(measured_runs() | {key(EXACT, 0, 0.5): measurement(0.1)})
    paths = draw(found, tmp_path, "bench")
    assert len(paths) == 4
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.parametrize(("used", "looks", "rests"), [([2.0, 1.9, 0.1, 2.0], 3, True), ([2.0] * 100, 30, False)])
def test_a_server_is_waited_for_until_it_rests_but_not_for_ever(
    used: list[float], looks: int, rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU seconds in each look of two seconds, by a clock that only waiting moves."""
    slept: list[float] = []
    monkeypatch.setattr(resources.time, "sleep", slept.append)
    monkeypatch.setattr(resources.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(resources.CPUMeter, "seconds", lambda self: used[len(slept) - 1])
    assert resources.wait_until_quiet(psutil.Process()) is rests
    assert len(slept) == looks


@pytest.mark.parametrize("rests", [True, False])
def test_a_measurement_says_when_its_server_had_not_come_to_rest(
    rests: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One server's turn, with a process that is no server and answers that were made up."""
    plan = choose(models="10m", arms=EXACT, device_blocks=16).plan
    workload = long_document_qa(random.Random(0), WORDS, documents=1, document_tokens=10, repeats=1)
    this = psutil.Process()

    @contextlib.contextmanager
    def running(command, url, model, log, start_s):
        yield measuring.BenchServer(url, this, log)

    monkeypatch.setattr(measuring, "running", running)
    monkeypatch.setattr(measuring, "model_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(measuring, "_warm_up", lambda folder: workload)
    monkeypatch.setattr(measuring, "_send", lambda *_: [one(0), one(1, returning=True)])
    monkeypatch.setattr(measuring, "REST_S", 0.0)
    monkeypatch.setattr(measuring, "wait_until_quiet", lambda process: rests)
    said: list[str] = []
    watch = measuring.Watch(now=lambda text: None, done=lambda request: None, measured=said.append)
    wanted = {key(): Case(workload, 1.5)}
    journal = Journal(tmp_path / "journal.jsonl")
    measuring._one_server(plan, ARMS[EXACT], wanted, journal, tmp_path, 8000, 1.0, "10m", watch)
    assert any("had not come to rest" in line for line in said) is not rests
    assert list(journal.figures) == [key()]
