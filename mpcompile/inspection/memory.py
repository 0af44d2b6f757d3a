"""What a graph holds in memory at its peak, by role: parameters, gradients, activations ...

This is the graph's own accounting, from the types of its values and from where each is read last.
Every op is taken by itself and in graph order, so it says what a rewrite gains or loses; what runs
may hold less (Inductor fuses ops and reuses memory) or more (scratch memory of kernels).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._ops import OpOverload
from torch.fx import Graph, Node

from mpcompile.graph import nodes
from mpcompile.graph.roles import InputRole
from mpcompile.inspection.measure import num_bytes


class MemoryRole(enum.Enum):
    """What memory is for."""

    PARAMETER = "parameters"
    STATE = "state"
    GRADIENT = "gradients"
    ACTIVATION = "activations"
    COPY = "16-bit copies"
    INPUT = "inputs"
    TEMPORARY = "temporaries"


@dataclass(frozen=True)
class MemoryPeak:
    """What is alive at one node of a graph, the one where it is most.

    Attributes:
        node: its name; that of the output if nothing needs more than the results do.
        line: the user's line of it, or ''.
        is_backward: whether it belongs to backward.
        bytes: by role. Inputs are there all the time, data and buffers among them. Activations are
            what forward keeps for backward, copies are casts of parameters, gradients are results
            of backward, temporaries the rest.
    """

    node: str
    line: str
    is_backward: bool
    bytes: dict[MemoryRole, int] = field(default_factory=dict)

    def total(self) -> int:
        """Bytes of all roles."""
        return sum(self.bytes.values())


_OF_INPUTS = {
    InputRole.PARAMETER: MemoryRole.PARAMETER,
    InputRole.STATE: MemoryRole.STATE,
    InputRole.GRADIENT: MemoryRole.GRADIENT,
    InputRole.TANGENT: MemoryRole.TEMPORARY,
}


class GraphPart(enum.Enum):
    """What of a region a graph is."""

    WHOLE = "whole"
    FORWARD = "forward"
    BACKWARD = "backward"


class RegionMemory:
    """Measures the graphs of one region: one, or forward and then the backward cut off from it.

    Attributes:
        peak: the larger one; None until a graph was measured.
    """

    def __init__(self) -> None:
        self.peak: MemoryPeak | None = None
        self._fixed: dict[MemoryRole, int] = {}
        self._copies: set[str] = set()

    def measure(
        self,
        graph: Graph,
        inputs: Mapping[Node, InputRole],
        backward: set[Node],
        part: GraphPart = GraphPart.WHOLE,
    ) -> None:
        """Measure ``graph``, a graph of ATen ops.

        Args:
            graph: the region, or a part of it.
            inputs: what each placeholder is to the user.
            backward: the nodes of backward.
            part: which part it is. In backward, placeholders that stand for no input of the user's
                are what forward has kept; they are freed when they have been read.
        """
        labels = _Labels(graph, inputs, backward, part, self._copies).roles
        fixed = Counter[MemoryRole]()
        for node in graph.find_nodes(op="placeholder"):
            if not _is_handed_over(node, part):
                fixed[labels[node]] += _size(node)
        if part is GraphPart.BACKWARD:  # reads some of them; all are there
            fixed = Counter(self._fixed)
        else:
            self._fixed = dict(fixed)
            self._copies = {n.name for n, role in labels.items() if role is MemoryRole.COPY}
        found, at = _find_peak(graph, labels, fixed, part)
        peak = MemoryPeak(
            node=at.name,
            line=nodes.user_line(at),
            is_backward=part is GraphPart.BACKWARD or at in backward,
            bytes={role: found[role] for role in MemoryRole if found[role]},
        )
        if self.peak is None or peak.total() > self.peak.total():
            self.peak = peak


def _find_peak(
    graph: Graph, labels: Mapping[Node, MemoryRole], fixed: Counter[MemoryRole], part: GraphPart
) -> tuple[Counter[MemoryRole], Node]:
    """Return what is alive at the node where it is most, and that node."""
    freed: dict[Node, list[Node]] = {}
    for value, reader in _last_reads(graph).items():
        freed.setdefault(reader, []).append(value)
    alive = fixed.copy()
    for node in graph.find_nodes(op="placeholder"):
        if _is_handed_over(node, part):
            alive[labels[node]] += _size(node)
    peak, at = Counter[MemoryRole](), graph.output_node()
    for node in graph.nodes:
        if node.op == "call_function":
            for value in _allocated(node):
                alive[labels[value]] += _size(value)
        if node.op in ("call_function", "output") and alive.total() > peak.total():
            peak, at = alive.copy(), node
        for value in freed.get(node, ()):
            if value.op == "call_function" or _is_handed_over(value, part):
                alive[labels[value]] -= _size(value)
    return peak, at


class _Labels:
    """The role of each value that has memory of its own, as ``roles``."""

    def __init__(
        self,
        graph: Graph,
        inputs: Mapping[Node, InputRole],
        backward: set[Node],
        part: GraphPart,
        copies: set[str],
    ) -> None:
        self._inputs, self._part, self._copies = inputs, part, copies
        self._backward = set(graph.nodes) if part is GraphPart.BACKWARD else backward
        self._results = {_owner(node) for node in graph.output_node().all_input_nodes}
        read = {source for node in backward for source in node.all_input_nodes}
        self._saved = {_owner(source) for source in read} - backward
        self.roles: dict[Node, MemoryRole] = {}
        for node in graph.nodes:
            self.roles[node] = self._role(node)

    def _role(self, node: Node) -> MemoryRole:
        if node.op in ("placeholder", "get_attr"):
            return self._role_of_input(node)
        if _is_copy_of_parameter(node, self.roles):
            return MemoryRole.COPY
        is_result = node in self._results
        if node in self._backward:
            return MemoryRole.GRADIENT if is_result else MemoryRole.TEMPORARY
        is_kept = node in self._saved or (is_result and self._part is GraphPart.FORWARD)
        return MemoryRole.ACTIVATION if is_kept else MemoryRole.TEMPORARY

    def _role_of_input(self, node: Node) -> MemoryRole:
        role = self._inputs.get(node, InputRole.DATA)
        if not _is_handed_over(node, self._part) or role is InputRole.TANGENT:
            return _OF_INPUTS.get(role, MemoryRole.INPUT)
        return MemoryRole.COPY if node.name in self._copies else MemoryRole.ACTIVATION


def _is_handed_over(node: Node, part: GraphPart) -> bool:
    """Whether ``node`` stands for what forward has kept for this graph, or for a tangent."""
    if part is not GraphPart.BACKWARD or node.op != "placeholder":
        return False
    return not isinstance(node.meta.get("desc"), PlainAOTInput)


def _is_copy_of_parameter(node: Node, roles: Mapping[Node, MemoryRole]) -> bool:
    if not nodes.is_cast(node) or not nodes.is_half(node):
        return False
    source = node.args[0]
    return isinstance(source, Node) and roles.get(_owner(source)) is MemoryRole.PARAMETER


def _last_reads(graph: Graph) -> dict[Node, Node]:
    """Return for each value with memory of its own the last node that reads it, or makes it."""
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        for value in _allocated(node):
            last[value] = node
        for source in node.all_input_nodes:
            last[_owner(source)] = node
    return last


def _owner(node: Node) -> Node:
    """Return the value whose memory ``node`` shows."""
    while node.op == "call_function" and _writes_input(node):
        source = node.args[0]
        if not isinstance(source, Node):
            break
        node = nodes.root(source)
    return nodes.root(node)


def _allocated(node: Node) -> Iterator[Node]:
    """Yield the values that ``node`` makes: itself, or the ones picked from its results."""
    if node.op in ("placeholder", "get_attr"):
        yield node
    if node.op != "call_function" or nodes.is_getitem(node):
        return
    if _has_several(node):
        yield from (picked for picked in _picked(node) if _owner(picked) is picked)
    elif _owner(node) is node:
        yield node


def _picked(node: Node) -> Iterator[Node]:
    """Yield what is picked from the results of ``node``, tuples among them taken apart."""
    for user in node.users:
        if nodes.is_getitem(user) and _has_several(user):
            yield from _picked(user)
        elif nodes.is_getitem(user):
            yield user


def _has_several(node: Node) -> bool:
    """Whether ``node`` has several results; ops that keep a random state do not say so."""
    return nodes.is_tuple(node) or any(map(nodes.is_getitem, node.users))


def _writes_input(node: Node) -> bool:
    """Whether the result of ``node`` is the tensor that it writes to."""
    if not isinstance(node.target, OpOverload):
        return False
    infos = [result.alias_info for result in node.target._schema.returns]
    return any(info is not None and info.is_write for info in infos)


def _size(node: Node) -> int:
    value = nodes.value(node)
    return num_bytes(value) if isinstance(value, Tensor) else 0
