"""Experiments 7, 9 and 10: what reuse brings from each tier, and what moving KV costs beside computing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from load_tests.experiments.columns import MODEL, PROMPT, Column, Row, mib, ms
from load_tests.experiments.experiment import Experiment, Panel, Point, by_model, spread
from load_tests.experiments.sizes import Sizes
from load_tests.harness.engine_process import EngineProcess
from load_tests.measuring import plots
from load_tests.measuring.report import bullets, listed
from load_tests.measuring.spread import ratios

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCES = ("none", "device", "cpu", "redis")
"""Where a prompt's KV comes from; `none`: it is computed."""
ENDS = ("", "_min", "_max")
FROM_REDIS = Column("redis_reused", "from Redis, %", 100, 0)


def rounds(point: Point, engine: EngineProcess) -> list[dict[str, Any]]:
    """See `tiered_engine.TieredHost.round`; each with a prompt of its own."""
    values = point.values
    named = {"codec": values["codec"]} if "codec" in values else {}
    return [
        engine.call("round", tokens=values["prompt_tokens"], max_tokens=values["answer_tokens"], **named)
        for _ in range(values["repeats"])
    ]


def times_by_source(found: Sequence[dict[str, Any]], time: str, sources: Sequence[str] = SOURCES) -> Row:
    """`{source}_{time}` with spread, and `{source}_ratio` to the same round's `none`."""
    row: Row = {}
    for source in sources:
        seconds = [one[source][time] for one in found]
        row |= spread(f"{source}_{time}", seconds)
        row |= spread(f"{source}_ratio", ratios(seconds, [one["none"][time] for one in found]))
    return row


def least_reused(found: Sequence[dict[str, Any]], source: str) -> float:
    """Of the prompt's tokens, the least part that really came from there: less where a load missed its deadline."""
    most = max(one["device"]["reused"] for one in found)
    return min(one[source]["reused"] for one in found) / max(1, most)


class ReuseLatency(Experiment):
    """Time to the first token and to the last one, with and without reuse."""

    name = "reuse_latency"
    title = "Latency with and without reuse"
    question = (
        "How long until the first and the last token, with nothing to reuse and with KV on the device, in a CPU tier, "
        "in Redis?"
    )
    setting = "kv.load_or_recompute"
    tiered = True
    columns = (
        MODEL,
        PROMPT,
        Column("source", "KV from"),
        ms("ttft_s", "TTFT"),
        Column("ttft_ratio", "÷ without", 1, 2),
        ms("total_s", "last token"),
        Column("total_ratio", "÷ without", 1, 2),
    )
    sample = ("prompt_tokens", 2)
    note = (
        "Engine, manager, CPU tier and Redis as in a server, without HTTP; everything stored is loaded "
        "(`kv.load_or_recompute: load`)."
    )

    def values(self, sizes: Sizes, model: str) -> list[Row]:
        """A prompt length each."""
        answer = {"answer_tokens": 16 if sizes.quick else 64}
        return [{"prompt_tokens": tokens, **answer} for tokens in sizes.tiered_prompts(model)]

    def measure(self, point: Point, engine: EngineProcess) -> list[Row]:
        """A row for each place that the prompt's KV comes from; in each round all of them, one after the other."""
        found = rounds(point, engine)
        first, last = times_by_source(found, "ttft_s"), times_by_source(found, "seconds")
        rows = []
        for source in SOURCES:
            row: Row = {"source": source}
            for end in ENDS:
                row[f"ttft_s{end}"] = first[f"{source}_ttft_s{end}"]
                row[f"ttft_ratio{end}"] = first[f"{source}_ratio{end}"]
                row[f"total_s{end}"] = last[f"{source}_seconds{end}"]
                row[f"total_ratio{end}"] = last[f"{source}_ratio{end}"]
            rows.append(row)
        return rows

    def plot(self, rows: Sequence[Row], figure: Figure) -> None:
        """A column of plots for each model."""
        models = by_model(rows)
        grid = figure.subplots(2, len(models), squeeze=False, sharex="col")
        for column, (model, own) in enumerate(models.items()):
            plots.lines(grid[0][column], own, "prompt_tokens", "ttft_s", by="source")
            plots.finish(grid[0][column], "", "TTFT, s", ylog=True, title=model)
            plots.lines(grid[1][column], own, "prompt_tokens", "total_s", by="source")
            plots.finish(grid[1][column], "prompt, tokens", "last token, s", ylog=True)

    def conclusion(self, rows: Sequence[Row]) -> str:
        """Whether what is stored should be loaded."""
        parts, slower = [], []
        for model, own in by_model(rows).items():
            longest = max(row["prompt_tokens"] for row in own)
            last = {row["source"]: row for row in own if row["prompt_tokens"] == longest}
            device, cpu, redis = (last[source]["ttft_ratio"] for source in SOURCES[1:])
            parts.append(
                f"{model}, {longest:,} tokens: first token from the device {device:.2f}, from the CPU tier {cpu:.2f}, "
                f"from Redis {redis:.2f}; last token from the CPU tier {last['cpu']['total_ratio']:.2f}"
            )
            slower += [f"{row['source']} at {row['prompt_tokens']:,} ({model})" for row in own if row["ttft_ratio"] > 1]
        verdict = (
            f"Loading does not pay from {listed(slower)}: `kv.load_or_recompute` is `auto` and not `load`."
            if slower
            else "Loading paid at every length measured here: `kv.load_or_recompute: auto` loads all that is stored."
        )
        return f"{verdict} As a part of the time without reuse, at each model's longest prompt:{bullets(parts)}"


class Swap(Experiment):
    """Moving a prompt's KV out of and into the device, for each tier, beside computing it again."""

    name = "swap"
    title = "Swap against recompute"
    question = "How long do swap-in and swap-out take for each tier, beside recompute?"
    setting = "kv.load_or_recompute"
    tiered = True
    columns = (
        MODEL,
        PROMPT,
        mib("kv_bytes", "KV"),
        ms("none_ttft_s", "recompute"),
        ms("cpu_ttft_s", "CPU in"),
        ms("redis_ttft_s", "Redis in"),
        Column("cpu_ratio", "CPU ÷ recompute", 1, 2),
        Column("redis_ratio", "Redis ÷ recompute", 1, 2),
        FROM_REDIS,
        ms("out_cpu_s", "CPU out", spread=False),
        ms("out_redis_s", "Redis out", spread=False),
    )
    sample = ("prompt_tokens", 2)
    note = (
        "In: until the first token. Out: from the beginning of the save until the tier has all; what goes to Redis "
        "goes through the CPU tier. Raw bytes; the CSV has device hits and spreads."
    )
    arms = {  # noqa: RUF012
        "none_ttft_s": "recompute", "device_ttft_s": "device hit", "cpu_ttft_s": "in, CPU tier",
        "redis_ttft_s": "in, Redis", "out_cpu_s": "out, CPU tier", "out_redis_s": "out, Redis",
    }  # fmt: skip

    def values(self, sizes: Sizes, model: str) -> list[Row]:
        """A prompt length each; the first token is all that is waited for."""
        return [{"prompt_tokens": tokens, "answer_tokens": 1} for tokens in sizes.tiered_prompts(model)]

    def measure(self, point: Point, engine: EngineProcess) -> list[Row]:
        """In and out are of the same prompts; `none` is recompute."""
        found = rounds(point, engine)
        row = times_by_source(found, "ttft_s")
        for tier in ("cpu", "redis"):
            row |= spread(f"out_{tier}_s", [one["out"][tier] for one in found])
            row[f"{tier}_reused"] = least_reused(found, tier)
        return [row | {"kv_bytes": found[-1]["bytes"]["cpu"]}]

    def plot(self, rows: Sequence[Row], figure: Figure) -> None:
        """A plot for each model."""
        models = by_model(rows)
        (grid,) = figure.subplots(1, len(models), squeeze=False)
        for axes, (model, own) in zip(grid, models.items(), strict=True):
            for key, title in self.arms.items():
                arm = [row | {"arm": title} | {f"s{end}": row[f"{key}{end}"] for end in ENDS} for row in own]
                plots.lines(axes, arm, "prompt_tokens", "s", by="arm")
            plots.finish(axes, "prompt, tokens", "s", ylog=True, title=model)

    def conclusion(self, rows: Sequence[Row]) -> str:
        """Which tier beats computing, from which length on."""
        parts, all_win = [], True
        for model, own in by_model(rows).items():
            words = []
            for tier, name in (("cpu", "the CPU tier"), ("redis", "Redis")):
                wins = [row for row in own if row[f"{tier}_ratio"] < 1]
                all_win = all_win and len(wins) == len(own)
                if not wins:
                    words.append(f"{name} never")
                    continue
                last = own[-1]
                words.append(
                    f"{name} from {wins[0]['prompt_tokens']:,} tokens on, {last[f'{tier}_ratio']:.2f} of recompute "
                    f"at {last['prompt_tokens']:,}"
                )
            parts.append(f"{model}: {'; '.join(words)}")
        verdict = (
            "On this machine `load` would do as well as the default `auto` of `kv.load_or_recompute`."
            if all_win
            else "Neither `load` nor `recompute` is right everywhere: `kv.load_or_recompute` stays `auto`."
        )
        return f"{verdict} Swapping in beats recompute from these lengths on:{bullets(parts)}"


class SwapCompressed(Experiment):
    """The same for Redis with compressed KV."""

    name = "swap_compressed"
    title = "Swap with compressed KV"
    question = "How do swap-in and swap-out change with compressed KV in Redis?"
    setting = "kv.redis_codec"
    tiered = True
    columns = (
        MODEL,
        Column("codec", "codec"),
        PROMPT,
        mib("kv_bytes", "KV"),
        Column("times_smaller", "times smaller", 1, 2),
        ms("none_ttft_s", "recompute"),
        ms("redis_ttft_s", "Redis in"),
        Column("redis_ratio", "÷ recompute", 1, 2, spread=True),
        FROM_REDIS,
        ms("out_redis_s", "Redis out"),
    )
    panels = (
        Panel(
            "times_smaller", ("redis_ttft_s", "none_ttft_s"), "times smaller than raw", "in from Redis, ms", 1e3,
            xlog=False, tails=("", ", recompute"),
        ),
        Panel("times_smaller", ("out_redis_s",), "times smaller than raw", "out to Redis, ms", 1e3, xlog=False),
    )  # fmt: skip
    note = (
        "Redis is on the same machine: its link is memory. KV of random weights; generic codec profile; cachegen at "
        "level 2. int8 and cachegen are for tolerant prompts only."
    )
    longest = 2048
    codecs = ("raw", "lossless", "int8", "cachegen")

    def values(self, sizes: Sizes, model: str) -> list[Row]:
        """A codec each."""
        tokens = min(self.longest, sizes.tiered_prompts(model)[-1])
        return [{"codec": codec, "prompt_tokens": tokens, "answer_tokens": 1} for codec in self.codecs]

    def measure(self, point: Point, engine: EngineProcess) -> list[Row]:
        """Only Redis stores compressed; the CPU tier holds raw bytes."""
        found = rounds(point, engine)
        row = times_by_source(found, "ttft_s", ("none", "redis"))
        row |= spread("out_redis_s", [one["out"]["redis"] for one in found])
        row |= {"kv_bytes": found[-1]["bytes"]["cpu"], "stored_bytes": found[-1]["bytes"]["redis"]}
        smaller = row["kv_bytes"] / row["stored_bytes"]
        return [row | {"times_smaller": smaller, "redis_reused": least_reused(found, "redis")}]

    def plot(self, rows: Sequence[Row], figure: Figure) -> None:
        """With the codecs' names."""
        super().plot(rows, figure)
        for axes, panel in zip(figure.axes, self.panels, strict=True):
            for row in rows:
                place = row[panel.x], panel.scale * row[panel.ys[0]]
                axes.annotate(row["codec"], place, fontsize="x-small")

    def conclusion(self, rows: Sequence[Row]) -> str:
        """What compression costs where the link costs nothing."""
        parts, dearer = [], 0
        for model, own in by_model(rows).items():
            by_codec = {row["codec"]: row for row in own}
            if "raw" not in by_codec or "lossless" not in by_codec:
                continue
            raw = by_codec.pop("raw")
            words = [
                f"{codec} {row['times_smaller']:.1f} and {row['redis_ttft_s'] / raw['redis_ttft_s']:.2f}"
                for codec, row in by_codec.items()
            ]
            dearer += by_codec["lossless"]["redis_ttft_s"] > 1.1 * raw["redis_ttft_s"]
            parts.append(f"{model}: {', '.join(words)}")
        if not parts:
            return "Raw and lossless are both needed for a sentence on `kv.redis_codec`."
        verdict = (
            "pays in time for room and for slower links. With Redis on the same machine and room enough `raw` is faster"
            if dearer
            else "costs nothing noticeable even with Redis on the same machine"
        )
        return (
            f"`kv.redis_codec: lossless` {verdict}. Times smaller than raw, and swap-in ÷ raw swap-in:{bullets(parts)}"
        )
