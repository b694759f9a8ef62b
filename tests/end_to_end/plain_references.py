"""What plain vLLM answers, asked once for each request: later tests and runs read it from pytest's cache folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.model_folder import PROJECT_ROOT
from load_tests.harness import plain_vllm
from load_tests.harness.conversations import Plan, Turn
from load_tests.micro.exactness import plain_answers

PARTED = 0.4
"""Of the turns: they leave the conversation so far at any token, and segments inside."""
TURNS = 3


def plan(conversations: int, seed: int, cleared: tuple[str, ...], pinned: bool = True) -> Plan:
    """Whatever is cleared, and however many conversations there are, the first ones ask the same: plain vLLM answers
    that once for all servers."""
    shape: dict[str, Any] = {"longest_prompt_tokens": 3000, "part_probability": PARTED}
    return Plan(conversations, TURNS, cleared=cleared, pinned=pinned, seed=seed, **shape)


def plain_references(turns: Sequence[Turn], model_folder: Path, folder: Path) -> list[dict[str, Any]]:
    """Plain vLLM's answer to each turn's request, in float32; `folder` keeps the answers.

    They are of these weights, of this lock file's vLLM, asked in this way, and of this kind of processor: with any
    other they are asked for anew.
    """
    file = folder / f"{_digest(model_folder)}.json"
    known: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    keys = [_key(turn) for turn in turns]
    missing = {key: turn for key, turn in zip(keys, turns, strict=True) if key not in known}
    if missing:
        answers = plain_answers(list(missing.values()), str(model_folder), "float32")
        known |= dict(zip(missing, answers, strict=True))
        written = file.with_suffix(".new")
        written.write_text(json.dumps(known))
        written.replace(file)
    return [known[key] for key in keys]


def _key(turn: Turn) -> str:
    return hashlib.sha256(json.dumps([turn.prompt, len(turn.answer)]).encode()).hexdigest()


def _digest(model_folder: Path) -> str:
    processor = [
        line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if line.startswith("flags")
    ][:1]
    locks = sorted((PROJECT_ROOT / "requirements").glob("c*.txt"))
    weights = sorted(path for path in model_folder.iterdir() if path.is_file())
    digest = hashlib.sha256("".join(processor).encode())
    for path in (*locks, Path(plain_vllm.__file__), *weights):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
