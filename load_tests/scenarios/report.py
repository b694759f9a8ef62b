"""A scenario's rounds as ratios to the defaults, in words and tables; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from load_tests.measuring.comparison import Comparison
from load_tests.measuring.report import listed, table, wrapped
from load_tests.measuring.spread import Spread
from load_tests.scenarios.measure import Round
from load_tests.scenarios.uses import DEFAULTS, SCENARIO, Use

FIGURES: Mapping[str, tuple[str, str, Callable[[Round], float], bool]] = {
    "ttft_s": ("time to the first token", "s", lambda one: one.ttft_s, False),
    "tokens_per_s": ("tokens/s of the workload", "tokens/s", lambda one: one.tokens_per_s, True),
    "cpu_bytes_per_token": (
        "CPU tier, bytes a prompt token", "B", lambda one: one.tier_bytes["cpu"] / one.prompt_tokens, False,
    ),
    "redis_bytes_per_token": (
        "Redis, bytes a prompt token", "B", lambda one: one.tier_bytes["redis"] / one.prompt_tokens, False,
    ),
}  # fmt: skip
"""By name: title, unit, how it is read, whether more is better."""
HEAD = ("what", "arm", "measured", "÷ defaults", "95 %")


@dataclass(frozen=True)
class Found:
    """All rounds of one scenario, by arm."""

    use: Use
    rounds: Mapping[str, Sequence[Round]]

    @property
    def complete(self) -> int:
        """Rounds, of each arm."""
        return len(self.rounds[DEFAULTS])

    def comparisons(self) -> dict[str, Comparison]:
        """By figure."""
        return {
            name: Comparison(
                title, unit, DEFAULTS, {arm: [value(one) for one in self.rounds[arm]] for arm in self.rounds}
            )
            for name, (title, unit, value, _) in FIGURES.items()
        }

    def lines(self) -> list[list[str]]:
        """Of the table. There is no ratio to nothing: where the defaults store nothing, values alone are shown."""
        found = []
        for one in self.comparisons().values():
            known = all(one.values[DEFAULTS])
            for arm in one.values:
                other = known and arm != DEFAULTS
                ratio = one.ratio(arm).slashed(".3f", bold=True) if other else "1" if known else ""
                interval = str(one.interval(arm)) if other else ""
                found.append([one.title, arm, f"{one.spread(arm).slashed()} {one.unit}", ratio, interval])
        return found

    def equal_answers(self, arm: str) -> tuple[int, int]:
        """How many answers of an arm are the default arm's, and of how many."""
        pairs = [
            (mine.answers.get(number), text)
            for mine, base in zip(self.rounds[arm], self.rounds[DEFAULTS], strict=True)
            for number, text in base.answers.items()
        ]
        return sum(mine == theirs for mine, theirs in pairs), len(pairs)

    def verdict(self) -> str:
        """One sentence: what is better, worse, and not shown to differ."""
        words: dict[str, list[str]] = {"better": [], "worse": [], "not shown": []}
        for name, one in self.comparisons().items():
            if not all(one.values[DEFAULTS]):
                continue
            interval, ratio = one.interval(SCENARIO), one.ratio(SCENARIO).median
            if not interval.is_shown:
                words["not shown"].append(one.title)
            else:
                good = (ratio > 1) == FIGURES[name][3]
                words["better" if good else "worse"].append(f"{one.title} ({ratio:.2f})")
        said = [f"{kind.capitalize()}: {listed(each)}." for kind, each in words.items() if each]
        return " ".join(said).replace("Not shown: ", "No difference is shown in ")

    def markdown(self, setting: Sequence[str]) -> str:
        """For the page."""
        reused = "; ".join(
            f"{arm} {Spread.of([one.reused for one in rounds]).median:.0%}" for arm, rounds in self.rounds.items()
        )
        equal = "; ".join("{} {} of {}".format(arm, *self.equal_answers(arm)) for arm in self.rounds if arm != DEFAULTS)
        said = ". ".join([*setting, "Least / median / most of the rounds; ratios are of one round"])
        notes = (
            f"{self.verdict()} Timed prompts' tokens that were not computed: {reused}. "
            f"Answers equal to the defaults': {equal}."
        )
        return "\n\n".join([wrapped(f"*{said}.*"), table(HEAD, self.lines()), wrapped(notes)])

    def as_dict(self) -> dict[str, Any]:
        """For `--json`, without texts."""
        return {
            "scenario": self.use.scenario,
            "complete": self.complete,
            "verdict": self.verdict(),
            "comparisons": [one.as_dict() for one in self.comparisons().values() if all(one.values[DEFAULTS])],
            "equal_answers": {arm: self.equal_answers(arm) for arm in self.rounds if arm != DEFAULTS},
            "rounds": {
                arm: [{k: v for k, v in asdict(one).items() if k != "answers"} for one in rounds]
                for arm, rounds in self.rounds.items()
            },
        }
