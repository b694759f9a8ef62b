"""From the command line's words to a plan, or one sentence that says what cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs import machine
from load_tests.bench.arms import ARMS
from load_tests.bench.plan import Plan, Sizes
from load_tests.harness.models import SHAPES
from load_tests.measuring.program import InputError, chosen
from load_tests.peers.engine import Dtype
from load_tests.workloads import WORKLOADS


@dataclass(frozen=True)
class Defaults:
    """What is measured where nothing is said; `name` begins the results' file names."""

    name: str
    models: str
    arms: str
    workloads: str
    working_sets: str
    alternations: int
    device_blocks: int


FULL = Defaults(
    "bench", "365m", ",".join(ARMS), "long-document-qa,multi-round-qa,rearranged-chunks", "0.5,1.5,3", 3, 128
)
QUICK = Defaults(
    "quick", "40m", "plain,serve-llm,crosskv,crosskv-blended", "long-document-qa,rearranged-chunks", "1.5", 1, 32
)


@dataclass(frozen=True)
class Choice:
    """`name` begins the results' file names; `skipped` says by arm why this machine cannot run it."""

    name: str
    plan: Plan
    skipped: Mapping[str, str]

    @classmethod
    def made(
        cls,
        default: Defaults,
        sizes: Sizes,
        models: str | None,
        arms: str | None,
        workloads: str | None,
        working_sets: str | None,
        alternations: int | None,
    ) -> Choice:
        """Lists have commas between their words; None is the default. Raises InputError."""
        wanted = chosen("arm", (arms or default.arms).split(","), ARMS)
        skipped = {name: reason for name in wanted if (reason := ARMS[name].unfit())}
        fit = tuple(name for name in wanted if name not in skipped)
        if not fit:
            reasons = "; ".join(f"{ARMS[name].title}: {reason}" for name, reason in skipped.items())
            raise InputError(f"No arm is left ({reasons}); choose others of {', '.join(ARMS)}.")
        plan = Plan(
            models=chosen("model", (models or default.models).split(","), SHAPES),
            arms=fit,
            workloads=chosen("workload", (workloads or default.workloads).split(","), WORKLOADS),
            working_sets=_working_sets(working_sets or default.working_sets),
            alternations=alternations or default.alternations,
            sizes=sizes,
        )
        if not plan.keys():
            raise InputError(f"{', '.join(fit)} is measured on none of {', '.join(plan.workloads)}; choose another.")
        return cls(default.name, plan, skipped)


def default_dtype() -> Dtype:
    """What `dtype: auto` is on this machine, for crosskv and all its peers."""
    return machine.cpu_dtype() if machine.accelerator() == "cpu" else "auto"


def _working_sets(words: str) -> tuple[float, ...]:
    try:
        sizes = tuple(dict.fromkeys(float(word) for word in words.split(",") if word.strip()))
    except ValueError:
        raise InputError(f"Working sets {words!r} are not numbers; write them as 0.5,1.5,3.") from None
    if not sizes or min(sizes) <= 0:
        raise InputError(f"Working sets {words!r} must be above zero; write them as 0.5,1.5,3.")
    return sizes
