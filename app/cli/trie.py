"""`crosskv trie`: the hottest of the trie as a tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from app.cli.failures import NOT_SO, CommandError, tells_failures
from app.cli.options import DEFAULT_URL, AsJson, KeyFile, Url
from app.cli.server import ServerClient, connect
from app.cli.terminal import line, plain, print_json, size

PATH = "/api/v1/kv/trie"
EVERYTHING = {"depth": 16, "most": 2000}
"""As much as a server shows at once."""
KEY_CHARACTERS = 12


@tells_failures
def trie(
    root: Annotated[str | None, typer.Option(help="A node's id, or what is shown of it: what lies below.")] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Levels below the root.")] = None,
    most: Annotated[int | None, typer.Option(min=1, help="Nodes, the hottest ones.")] = None,
    url: Url = DEFAULT_URL, key_file: KeyFile = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show the hottest stored prefixes as a tree: tokens, uses, bytes, and the tiers that have them."""
    with connect(url, key_file) as server:
        params = {"root": None if root is None else _whole_id(server, root), "depth": depth, "most": most}
        found = server.get(PATH, {name: value for name, value in params.items() if value is not None})
    console = Console(soft_wrap=True)
    if as_json:
        print_json(console, found)
    else:
        title = server.url if root is None else f"below {root} at {server.url}"
        hidden = _number(found.get("hidden"))
        console.print(tree_of(title + (f", +{hidden:.0f} hidden" if hidden else ""), _nodes(found)))


def tree_of(title: str, nodes: Sequence[Mapping[str, Any]]) -> Tree:
    """The nodes below their parents, each once; those whose parent is not among them at the top. Ends on circles."""
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


def _whole_id(server: ServerClient, beginning: str) -> str:
    """The id of the one node that is shown so. Raises CommandError: there is none, or there are several."""
    if len(beginning) > KEY_CHARACTERS:
        return beginning
    ids = [str(node.get("id")) for node in _nodes(server.get(PATH, EVERYTHING))]
    found = [one for one in ids if one.startswith(beginning.lower())]
    if len(found) != 1:
        how_many = "Several nodes are" if found else "None of the hottest nodes is"
        raise CommandError(f"{how_many} shown as {beginning}: give more of the id (--json shows it whole).", NOT_SO)
    return found[0]


def _nodes(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [node for node in found.get("nodes") or () if isinstance(node, Mapping)]


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
        (plain(str(node.get("id"))[:KEY_CHARACTERS]), "bold"),
        f" {plain(node.get('kind'))}, {_number(node.get('tokens')):.0f} tokens, {_number(node.get('uses')):.1f} uses, ",
        f"{size(_number(node.get('bytes')))} ",
        (f"[{plain('; '.join(places) or 'stored nowhere')}]", "cyan"),
        *((f" resumes at {_number(one.get('end_token')):.0f}", "green") for one in _landings(node)),
        (" pinned" if node.get("pinned") else "", "yellow"),
        (f" +{hidden:.0f} hidden" if hidden else "", "dim"),
    )


def _landings(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Where a prompt of a model with states can be resumed in a node."""
    return [one for one in node.get("landings") or () if isinstance(one, Mapping)]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
