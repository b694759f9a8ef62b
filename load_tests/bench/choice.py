"""From the command line's words to a plan, or one sentence that says what cannot be."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from configs import machine
from load_tests.bench.arms import ARMS
from load_tests.bench.plan import Plan, Sizes
from load_tests.harness.models import SHAPES
from load_tests.peers.engine import Dtype
from load_tests.workloads import WORKLOADS


class InputError(Exception):
    """What was asked for cannot be done. One sentence that says what would work."""


@dataclass(frozen=True)
class Defaults:
    """What is measured where nothing is said."""

    models: str
    arms: str
    workloads: str
    working_sets: str
    alternations: int
    device_blocks: int


FULL = Defaults("365m", ",".join(ARMS), "long-document-qa,multi-round-qa", "0.5,1.5,3", 3, 128)
QUICK = Defaults("40m", "plain,serve-llm,crosskv", "long-document-qa", "1.5", 1, 32)


@dataclass(frozen=True)
class Choice:
    """`name` begins the results' file names; `skipped` says by arm why this machine cannot run it."""

    name: str
    plan: Plan
    skipped: Mapping[str, str]

    @classmethod
    def made(
        cls,
        *,
        models: str | None,
        arms: str | None,
        workloads: str | None,
        working_sets: str | None,
        alternations: int | None,
        replicas: int,
        device_blocks: int | None,
        dtype: Dtype | None,
        requests_per_s: float | None,
        seed: int,
        quick: bool,
    ) -> Choice:
        """Lists have commas between their words; None is the default. Raises InputError."""
        default = QUICK if quick else FULL
        wanted = _listed("arm", arms or default.arms, ARMS)
        skipped = {name: reason for name in wanted if (reason := ARMS[name].unfit())}
        fit = tuple(name for name in wanted if name not in skipped)
        if not fit:
            reasons = "; ".join(f"{ARMS[name].title}: {reason}" for name, reason in skipped.items())
            raise InputError(f"No arm is left ({reasons}); choose others of {', '.join(ARMS)}.")
        plan = Plan(
            models=_listed("model", models or default.models, SHAPES),
            arms=fit,
            workloads=_listed("workload", workloads or default.workloads, WORKLOADS),
            working_sets=_sizes(working_sets or default.working_sets),
            alternations=alternations or default.alternations,
            sizes=Sizes(
                replicas, device_blocks or default.device_blocks, dtype or default_dtype(), requests_per_s, seed
            ),
        )
        return cls("quick" if quick else "bench", plan, skipped)


def default_dtype() -> Dtype:
    """The CPU backend computes in float32: on a processor without bfloat16 instructions that is many times faster."""
    return "float32" if machine.accelerator() == "cpu" else "auto"


def writable(folder: Path) -> Path:
    """The folder, made where it is absent. Raises InputError when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written to ({error.strerror}); name another folder with --results."
        ) from None


def _listed(kind: str, words: str, known: Collection[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    for name in names:
        if name not in known:
            raise InputError(f"There is no {kind} {name!r}; choose of {', '.join(known)}.")
    if not names:
        raise InputError(f"No {kind} is named; choose of {', '.join(known)}.")
    return names


def _sizes(words: str) -> tuple[float, ...]:
    try:
        sizes = tuple(dict.fromkeys(float(word) for word in words.split(",") if word.strip()))
    except ValueError:
        raise InputError(f"Working sets {words!r} are not numbers; write them as 0.5,1.5,3.") from None
    if not sizes or min(sizes) <= 0:
        raise InputError(f"Working sets {words!r} must be above zero; write them as 0.5,1.5,3.")
    return sizes
