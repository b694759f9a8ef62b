"""Plans and directives travel as values: no function on their way takes more than five arguments."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 5
FLOWS = (
    "app/backend/manager_control.py",
    "app/gate/observed_prompt.py",
    "app/openai/engine_client.py",
    "app/openai/observers.py",
    "app/openai/retries.py",
    "deployments/engine/directive_runner.py",
    "deployments/engine/handle.py",
    "deployments/engine/process/front.py",
    "deployments/engine/process/service.py",
    "deployments/manager/actor.py",
    "deployments/manager/control.py",
    "deployments/manager/directive_log.py",
    "deployments/manager/directive_sender.py",
    "deployments/port/cluster_port.py",
    "deployments/protocol/engine_hints.py",
    "deployments/protocol/kv_port.py",
    "deployments/replica/manager_link.py",
    "deployments/replica/prompt_plans.py",
    "deployments/router/placement_feed.py",
    "kvmanager/extensions/blend/blend_choice.py",
    "kvmanager/loading/load_choice.py",
    "kvmanager/manager.py",
    "kvmanager/extensions/blend/chunks.py",
    "kvmanager/moves/directive_ledger.py",
    "kvmanager/moves/directives.py",
    "kvmanager/moves/plan.py",
    "kvmanager/moves/chain_search.py",
    "kvmanager/moves/plan_draft.py",
    "kvmanager/moves/planner.py",
    "kvmanager/extensions/blend/plans.py",
    "kvmanager/extensions/sparse/plans.py",
    "kvmanager/extensions/sparse/retained_prefixes.py",
)
NOT_OF_THEM = {
    # What vLLM calls.
    "app/openai/engine_client.py generate": 8,
    # Where a process is put together, and where a part introduces itself.
    "app/openai/engine_client.py __init__": 6,
    "deployments/engine/handle.py __init__": 7,
    "deployments/manager/actor.py register_tier": 7,
    "deployments/port/cluster_port.py __init__": 6,
    # Saves, and orders of people.
    "app/backend/manager_control.py evict": 7,
    "kvmanager/manager.py cut": 6,
}
"""Functions in these files that carry neither a plan nor a directive, and how many arguments each takes."""


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_no_function_of_the_flows_takes_more() -> None:
    found = {}
    for name in FLOWS:
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and arguments(node) > MOST:
                found[f"{name} {node.name}"] = arguments(node)
    assert found == NOT_OF_THEM
