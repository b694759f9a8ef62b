"""Experiment 9: moving a prompt's KV off the device and back, by form and link, compared with computing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from load_tests.experiments.columns import MODEL, Column, Row, mib, ms
from load_tests.experiments.experiment import Experiment, Point, by_model, spread
from load_tests.experiments.sizes import Sizes
from load_tests.harness.engine_process import EngineProcess
from load_tests.measuring import plots
from load_tests.measuring.report import bullets
from load_tests.measuring.spread import ratios
from load_tests.measuring.turns import rotated

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RAW = "raw"
FORMS = (RAW, "lossless", "cachegen", "sparse", "sparse + cachegen")
"""How KV is stored in Redis: names that `engines.tiered.CODECS` has. Another form is another name, here and there."""
CPU_TIER, HERE = "CPU tier", "Redis here"
LINKS: Mapping[str, float] = {HERE: 0.0, "10 Gbit/s": 1.25e9, "1 Gbit/s": 1.25e8}
"""Bytes per second between the node and Redis, of all its connections together; 0: as fast as this machine is."""
SEED = 1

Found = dict[str, Any]
"""One round of the engine, with the length of its prompt."""


class Swap(Experiment):
    """In and out in every form over every link; prompts have random lengths within bands."""

    name = "swap"
    title = "Swap against recompute"
    question = "How long do swap-in and swap-out of a prompt's KV take against recompute, by form, link and length?"
    setting = "kv.load_or_recompute"
    tiered = True
    columns = (
        MODEL,
        Column("link", "link"),
        Column("form", "form"),
        Column("prompt_tokens", "prompt", 1, 0, spread=True),
        mib("moved_bytes", "moved"),
        Column("times_smaller", "times smaller", 1, 1),
        ms("none_ttft_s", "recompute", spread=False),
        ms("in_ttft_s", "in", spread=False),
        Column("in_ratio", "in ÷ recompute", 1, 3, spread=True),
        ms("out_s", "out", spread=False),
        Column("out_ratio", "out ÷ recompute", 1, 3, spread=True),
        Column("reused", "of it reused, %", 100, 0),
    )
    note = (
        "In: until the first token. Out: from the beginning of the save until the tier has all; what goes to Redis "
        "goes through the CPU tier, which holds raw bytes. Medians; lengths are drawn, a band for each row, equal for "
        "all forms and links of a round, which take turns. Links of 1 and 10 Gbit/s are emulated before a Redis on this"
        " machine (`load_tests/harness/emulated_link.py`). KV of random weights; generic codec profile; cachegen at "
        "level 2; sparse keeps half of every layer (`kv.sparse: 50`). All but raw and lossless are for tolerant prompts"
        " only, whose attention mass is in every form's CPU tier."
    )

    def values(self, sizes: Sizes, model: str) -> list[Row]:
        """A band of lengths each; all forms and links are in it, so that they take turns."""
        arms = {"forms": ",".join(FORMS), "links": ",".join(LINKS)}
        return [
            {"shortest": shortest, "longest": longest, "seed": SEED, **arms}
            for shortest, longest in sizes.tiered_bands(model)
        ]

    def measure(self, point: Point, engine: EngineProcess) -> list[Row]:
        """A row for each form and link, and one for the CPU tier."""
        values = point.values
        rng = Random(f"{values['seed']}/{point.model}/{values['shortest']}")
        forms, links = values["forms"].split(","), values["links"].split(",")
        found: dict[tuple[str, str], list[Found]] = {}
        for number in range(values["repeats"]):
            tokens = rng.randint(values["shortest"], values["longest"])
            for form in rotated(forms, number):
                for link in rotated(links, number):
                    one = engine.call("round", tokens=tokens, max_tokens=1, codec=form, bytes_per_s=LINKS[link])
                    found.setdefault((link, form), []).append({**one, "tokens": tokens})
        rows = [_row(link, form, "redis", found[link, form]) for link in links for form in forms]
        return [_row(CPU_TIER, RAW, "cpu", found[HERE, RAW]), *rows]

    def shown(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The longest band of each model, and the shortest one of the CPU tier and of raw bytes."""
        chosen = []
        for own in by_model(rows).values():
            least, most = (end(row["shortest"] for row in own) for end in (min, max))
            chosen += [
                row for row in own if row["shortest"] == most or (row["shortest"] == least and row["form"] == RAW)
            ]
        return chosen

    def plot(self, rows: Sequence[Row], figure: Figure) -> None:
        """For each model a row of panels with the way in, and one with the way out; a column for each link."""
        models, links = by_model(rows), list(dict.fromkeys(row["link"] for row in rows if row["link"] != CPU_TIER))
        figure.set_size_inches(3.6 * len(links), 2.6 * 2 * len(models))
        grid = figure.subplots(2 * len(models), len(links), squeeze=False, sharex=True)
        for number, (model, own) in enumerate(models.items()):
            for column, link in enumerate(links):
                for place, (key, title) in enumerate((("in_ttft_s", "in"), ("out_s", "out"))):
                    self._panel(
                        grid[2 * number + place][column],
                        [row for row in own if row["link"] in (link, CPU_TIER)],
                        key,
                        f"{model}, {title}, {link}",
                    )

    def _panel(self, axes: Axes, rows: Sequence[Row], key: str, title: str) -> None:
        ways = [row | {"way": CPU_TIER if row["link"] == CPU_TIER else row["form"]} for row in rows]
        plots.lines(axes, ways, "prompt_tokens", key, by="way")
        computed = [row | {"way": "recompute"} for row in rows if row["form"] == RAW and row["link"] != CPU_TIER]
        plots.lines(axes, computed, "prompt_tokens", "none_ttft_s", by="way")
        plots.finish(axes, "prompt, tokens", "s", xlog=False, ylog=True, title=title)
        axes.title.set_fontsize("small")
        axes.legend(fontsize="x-small", ncols=2)

    def conclusion(self, rows: Sequence[Row]) -> str:
        """Where moving beats computing, and which form is worth it over which link."""
        slower = [row for row in rows if row["in_ratio"] > 1]
        verdict = (
            "Neither `load` nor `recompute` is right everywhere: `kv.load_or_recompute` stays `auto`."
            if slower
            else "On this machine `load` would do as well as the default `auto` of `kv.load_or_recompute`."
        )
        parts = []
        for model, own in by_model(rows).items():
            most = max(row["shortest"] for row in own)
            long = [row for row in own if row["shortest"] == most]
            for link in dict.fromkeys(row["link"] for row in long):
                forms = ", ".join(f"{row['form']} {row['in_ratio']:.2g}" for row in long if row["link"] == link)
                parts.append(f"{model}, {link}: {forms}")
        each = bullets(parts)
        return f"{verdict} {_worth(rows)} Swap-in ÷ recompute, each model's longest prompts, by link and form:{each}"


def _row(link: str, form: str, tier: str, found: Sequence[Found]) -> Row:
    """`found` are the rounds of one form over one link; in and out are of the same prompt, and so is recompute."""
    computed = [one["none"]["ttft_s"] for one in found]
    moved_in, moved_out = [one[tier]["ttft_s"] for one in found], [one["out"][tier] for one in found]
    kv_bytes = [one["bytes"]["cpu"] for one in found]
    moved = [one["bytes"][tier] for one in found]
    row: Row = {"link": link, "form": form, **spread("prompt_tokens", [one["tokens"] for one in found])}
    row |= spread("kv_bytes", kv_bytes) | spread("moved_bytes", moved)
    row |= spread("times_smaller", ratios(kv_bytes, moved))
    row |= spread("none_ttft_s", computed) | spread("in_ttft_s", moved_in) | spread("out_s", moved_out)
    row |= spread("in_ratio", ratios(moved_in, computed)) | spread("out_ratio", ratios(moved_out, computed))
    return row | {"reused": least_reused(found, tier)}


def least_reused(found: Sequence[Mapping[str, Any]], source: str) -> float:
    """Of the prompt's tokens, the least part that really came from there: less where a load missed its deadline."""
    return min(one[source]["reused"] / max(1, one["device"]["reused"]) for one in found)


def _worth(rows: Sequence[Row]) -> str:
    """Over which links a smaller form is in the device sooner than raw bytes, in most of the bands and models."""
    sooner: dict[str, list[str]] = {}
    for link in dict.fromkeys(row["link"] for row in rows if row["link"] != CPU_TIER):
        own = [row for row in rows if row["link"] == link]
        raw = {(row["model"], row["shortest"]): row["in_ttft_s"] for row in own if row["form"] == RAW}
        for form in dict.fromkeys(row["form"] for row in own if row["form"] != RAW):
            times = [(row["in_ttft_s"], raw.get((row["model"], row["shortest"]))) for row in own if row["form"] == form]
            known = [(mine, theirs) for mine, theirs in times if theirs is not None]
            if known and 2 * sum(mine < theirs for mine, theirs in known) > len(known):
                sooner.setdefault(link, []).append(form)
    if not sooner:
        return "No smaller form is in the device sooner than raw bytes."
    words = "; ".join(f"{link} {', '.join(forms)}" for link, forms in sooner.items())
    return f"In the device sooner than raw bytes, by link: {words}."
