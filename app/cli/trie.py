"""`crosskv trie`: the hottest of the trie as a tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from app.cli.failures import tells_failures
from app.cli.options import DEFAULT_URL, AsJson, KeyFile, Url
from app.cli.server import connect
from app.cli.terminal import line, plain, print_json, size

KEY_CHARACTERS = 12


@tells_failures
def trie(
    root: Annotated[str | None, typer.Option(help="The id of a node, to see what lies below it.")] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Levels below the root.")] = None,
    most: Annotated[int | None, typer.Option(min=1, help="Nodes, the hottest ones.")] = None,
    url: Url = DEFAULT_URL, key_file: KeyFile = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show the hottest stored prefixes as a tree: tokens, uses, bytes, and the tiers that have them."""
    params = {"root": root, "depth": depth, "most": most}
    with connect(url, key_file) as server:
        found = server.get("/api/v1/kv/trie", {name: value for name, value in params.items() if value is not None})
    console = Console(soft_wrap=True)
    if as_json:
        print_json(console, found)
    else:
        console.print(tree_of(server.url, found.get("nodes") or []))


def tree_of(title: str, nodes: Sequence[Mapping[str, Any]]) -> Tree:
    """The nodes below their parents; those whose parent is not among them, or that form a circle, stay at the top."""
    ids = {str(node.get("id")) for node in nodes}
    below: dict[str | None, list[Mapping[str, Any]]] = defaultdict(list)
    for node in nodes:
        parent = str(node.get("parent"))
        below[parent if parent in ids and parent != str(node.get("id")) else None].append(node)
    tree = Tree(line(title), guide_style="dim")
    waiting = [(tree, node) for node in _hottest_first(below[None])]
    seen: set[str] = set()
    while waiting:  # no recursion: a conversation is as deep as it is long
        branch, node = waiting.pop(0)
        if str(node.get("id")) in seen:
            continue
        seen.add(str(node.get("id")))
        shown = branch.add(_label(node))
        waiting += [(shown, child) for child in _hottest_first(below[str(node.get("id"))])]
    return tree


def _hottest_first(nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(nodes, key=lambda node: -_number(node.get("hotness")))


def _label(node: Mapping[str, Any]) -> Text:
    tiers = node.get("tiers")
    places = [
        f"{tier} {','.join(map(str, value))}" if isinstance(value, list) else str(tier)
        for tier, value in (tiers.items() if isinstance(tiers, Mapping) else ())
        if value
    ]
    hidden = _number(node.get("hidden"))
    return Text.assemble(
        (plain(str(node.get("id")), KEY_CHARACTERS), "bold"),
        f" {plain(node.get('kind'))}, {_number(node.get('tokens')):.0f} tokens, {_number(node.get('uses')):.1f} uses, ",
        f"{size(_number(node.get('bytes')))} ",
        (f"[{plain('; '.join(places) or 'stored nowhere')}]", "cyan"),
        (" pinned" if node.get("pinned") else "", "yellow"),
        (f" +{hidden:.0f} hidden" if hidden else "", "dim"),
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
