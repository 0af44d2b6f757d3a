"""What each input and output of an ATen graph is for, and what kind of graph it is.

Passes ask for roles, never for name patterns. AOTAutograd says which of Dynamo's inputs a
placeholder stands for (``meta["desc"]``); the role of that input is known where Dynamo's graph is
still at hand, and is handed in.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    TangentAOTInput,
)
from torch.fx import Graph, Node
from torch.nn import Parameter

from mpcompile.graph import nodes
from mpcompile.graph.gradients import private_outputs


class InputRole(enum.Enum):
    """What a graph input is to the user."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    STATE = "optimizer state"
    DATA = "data"
    TANGENT = "tangent"


class OutputRole(enum.Enum):
    """What a graph output is to the user."""

    VALUE = "value"
    GRADIENT = "gradient"
    MUTATION = "mutation"


class GraphKind(enum.Enum):
    """What a graph does. Only the first two are rewritten."""

    TRAINING = "forward+backward"
    INFERENCE = "forward"
    UPDATE = "update"


@dataclass(frozen=True)
class Roles:
    """The roles of one graph.

    Attributes:
        kind: what the graph does.
        inputs: role of every placeholder and get_attr.
        outputs: role of every output, in order.
        mutated: inputs that the graph writes to.
    """

    kind: GraphKind
    inputs: dict[Node, InputRole]
    outputs: tuple[OutputRole, ...]
    mutated: frozenset[Node]

    def is_parameter(self, node: Node) -> bool:
        """Whether ``node`` is a parameter of the user's model."""
        return self.inputs.get(node) is InputRole.PARAMETER


def find_roles(graph: Graph, input_roles: Sequence[InputRole]) -> Roles:
    """Label a functional ATen graph, and tag what of it is backward where torch has not.

    Args:
        graph: joint or inference graph of AOTAutograd.
        input_roles: role of each input of the Dynamo graph it was made from, in order.
    """
    inputs = {
        node: _input_role(node, input_roles)
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
    }
    _mark_behind([node for node, role in inputs.items() if role is InputRole.TANGENT], graph)
    mutated = frozenset(_mutated_inputs(graph))
    has_backward = any(role is InputRole.TANGENT for role in inputs.values()) or any(
        nodes.is_backward(node) for node in graph.nodes
    )
    return Roles(
        kind=_kind(inputs, mutated, has_backward),
        inputs=inputs,
        outputs=tuple(_output_roles(graph)),
        mutated=mutated,
    )


def _mark_behind(tangents: Sequence[Node], graph: Graph) -> None:
    """Tag all that is computed from ``tangents`` as backward; torch 2.11 leaves out what hooks do.

    Taken for a part of forward, a hook would be shown scaled gradients.
    """
    behind = set(tangents)
    for node in graph.nodes if tangents else ():
        is_computed = node.op == "call_function" and written_input(node) is None
        if is_computed and behind.intersection(node.all_input_nodes):
            behind.add(node)
            if not nodes.is_backward(node):
                nodes.mark_backward(node)


def _input_role(node: Node, input_roles: Sequence[InputRole]) -> InputRole:
    desc = node.meta.get("desc")
    if isinstance(desc, TangentAOTInput):
        return InputRole.TANGENT
    if isinstance(desc, PlainAOTInput) and desc.idx < len(input_roles):
        return input_roles[desc.idx]
    if isinstance(desc, ParamAOTInput) or isinstance(nodes.value(node), Parameter):
        return InputRole.PARAMETER
    if isinstance(desc, BufferAOTInput):
        return InputRole.STATE
    return InputRole.DATA


def _mutated_inputs(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        target = written_input(node)
        if target is not None:
            yield target
    for desc in graph.output_node().meta.get("desc") or ():
        if isinstance(desc, InputMutationAOTOutput):
            for node in graph.find_nodes(op="placeholder"):
                if node.meta.get("desc") == desc.mutated_input:
                    yield node


def _kind(inputs: dict[Node, InputRole], mutated: frozenset[Node], has_backward: bool) -> GraphKind:
    """A graph without backward that writes to anything but a module's buffers is an update.

    That is an optimizer, a clip that scales gradients in place, an average of weights; their
    arithmetic stays fp32. Batch normalisation in training mode writes to buffers only.
    """
    if has_backward:
        return GraphKind.TRAINING
    if any(inputs[node] is not InputRole.BUFFER for node in mutated):
        return GraphKind.UPDATE
    return GraphKind.INFERENCE


def _output_roles(graph: Graph) -> Iterator[OutputRole]:
    output = graph.output_node()
    descs = output.meta.get("desc") or ()
    values = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    for index in range(len(values)):
        desc = descs[index] if index < len(descs) else None
        if isinstance(desc, GradAOTOutput):
            yield OutputRole.GRADIENT
        elif isinstance(desc, InputMutationAOTOutput):
            yield OutputRole.MUTATION
        else:
            yield OutputRole.VALUE


def written_input(node: Node) -> Node | None:
    """Return the graph input that ``node`` copies a value into, or None."""
    target = node.args[0] if node.target is torch.ops.aten.copy_.default else None
    if isinstance(target, Node) and target.op in ("placeholder", "get_attr"):
        return target
    return None


def is_visible_reader(node: Node) -> bool:
    """Whether what ``node`` reads can be seen by the user: the output, a write into an input."""
    return node.op == "output" or written_input(node) is not None


def visible_values(graph: Graph) -> list[tuple[str, Node]]:
    """Return what the user can see of a graph: its outputs and what it writes into its inputs.

    Each comes with a name for messages. Outputs that only the runtime reads are left out.
    """
    private = private_outputs(graph)
    seen: list[tuple[str, Node]] = []
    for reader in graph.nodes:
        if reader.op == "output":
            outputs = reader.args[0] if isinstance(reader.args[0], (tuple, list)) else reader.args
            seen += [
                (f"output {index}", node)
                for index, node in enumerate(outputs)
                if isinstance(node, Node) and index not in private
            ]
        elif (target := written_input(reader)) is not None:
            source = reader.args[1]
            assert isinstance(source, Node)
            seen.append((f"what is written to %{target.name}", source))
    return [(name, node) for name, node in seen if nodes.tensor_values(node)]
