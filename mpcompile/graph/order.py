"""Order the nodes of a graph so that what has to be waited for is waited for late."""

from __future__ import annotations

from torch.fx import Graph, Node

from mpcompile.graph.roles import written_input


def put_off(graph: Graph, waits: set[Node]) -> None:
    """Move ``waits``, and what depends on them, behind all that does not; else keep the order.

    Nodes may stand in front of what they read before. What is written into inputs, at the end of a
    functional graph, stays at the end.
    """
    levels = _levels(graph, waits)
    last = max(levels.values(), default=0) + 1
    for node in graph.nodes:
        if node.op == "output" or written_input(node) is not None:
            levels[node] = last + (node.op == "output")
    by_level = sorted(graph.nodes, key=levels.__getitem__)  # a stable sort
    previous: Node | None = None
    for node in _behind_inputs(by_level):
        if previous is not None and previous.next is not node:
            previous.append(node)
        previous = node


def _levels(graph: Graph, waits: set[Node]) -> dict[Node, int]:
    """Return how many of ``waits`` lie one behind the other on the way to each node."""
    levels: dict[Node, int] = {}
    for node in _behind_inputs(list(graph.nodes)):
        level = max((levels[source] for source in node.all_input_nodes), default=0)
        levels[node] = level + (node in waits)
    return levels


def _behind_inputs(ordered: list[Node]) -> list[Node]:
    """Return the nodes with those moved back that stand in front of what they read."""
    placed: dict[Node, None] = {}
    waiting: dict[Node, list[Node]] = {}
    pending = ordered[::-1]
    while pending:
        node = pending.pop()
        missing = next((item for item in node.all_input_nodes if item not in placed), None)
        if missing is None:
            placed[node] = None
            pending.extend(reversed(waiting.pop(node, [])))
        else:
            waiting.setdefault(missing, []).append(node)
    return list(placed)
