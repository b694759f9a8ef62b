"""What every script asks, from `cases.json`, and how it tells what came: one line of JSON, which the test reads.

A script is started with the server's URL. Each of its cases returns what `test_clients.py` compares.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

CASES: dict[str, Any] = json.loads(Path(__file__).parents[1].joinpath("cases.json").read_text(encoding="utf-8"))
URL, MODEL, KEY = sys.argv[1], "demo", "none"
ASKED: list[Any] = [{"role": "system", "content": CASES["system"]}, {"role": "user", "content": CASES["question"]}]
TOOL, STEPS, TOLD = CASES["tool"], CASES["steps"], CASES["told"]
TOKENS, CUT, UNKNOWN = CASES["answer_tokens"], CASES["cut_tokens"], CASES["unknown_model"]


class Look(BaseModel):
    """Looks at a place."""

    model_config = ConfigDict(extra="forbid")
    place: Literal["mill", "harbour"]


def tell(package: str, *cases: Callable[[], Any]) -> None:
    """Print the package's version and, by the name of each case, what it returned or how it failed."""
    told: dict[str, Any] = {"version": version(package)}
    for case in cases:
        try:
            told[case.__name__] = case()
        except Exception:
            told[case.__name__] = {"failed": traceback.format_exc()[-3000:]}
    print(json.dumps(told))


def refused(error: type[Any], ask: Callable[[], Any]) -> list[Any]:
    """The status and the words of an error that this client has to raise."""
    try:
        ask()
    except error as raised:
        return [raised.status_code, str(raised)]
    return ["nothing was raised"]
