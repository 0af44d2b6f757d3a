"""What Dynamo's names say of inputs, and the inputs that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.testing._internal.two_tensor import TwoTensor

from mpcompile.capture import graph_inputs
from mpcompile.capture.graph_inputs import computes_with_grad, input_roles, refuse_unsupported
from mpcompile.errors import CaptureError
from mpcompile.graph.roles import InputRole
from tests.steps import compile_step


class _Source:
    """Stands for Dynamo's record of an input: a name in Python syntax."""

    def __init__(self, name: Any) -> None:
        self.source = self
        self.name = name


def graph_with_input(name: Any, val: Tensor) -> GraphModule:
    graph = Graph()
    node = graph.placeholder("x")
    node.meta.update(grapharg=_Source(name), example_value=val)
    graph.output((node,))
    return GraphModule({}, graph)


@pytest.mark.parametrize(
    ("name", "val", "role"),
    [
        ("G['net']._modules['0']._parameters['weight']", nn.Parameter(torch.ones(1)), "PARAMETER"),
        ("G['net']._parameters['weight'].grad", torch.ones(1), "GRADIENT"),
        ("L['self']._modules['1']._buffers['running_mean']", torch.ones(1), "BUFFER"),
        ("L['opt'].state[L['p']]['exp_avg']", torch.ones(1), "STATE"),
        ("L['x']", torch.ones(1), "DATA"),
        ("", torch.ones(1), "DATA"),
    ],
)
def test_role_follows_the_name_and_type_of_an_input(name: str, val: Tensor, role: str) -> None:
    assert input_roles(graph_with_input(name, val)) == (InputRole[role],)


def test_name_may_be_a_method_as_in_torch_2_11() -> None:
    gm = graph_with_input(lambda: "L['x']", torch.ones(1))
    (node,) = gm.graph.find_nodes(op="placeholder")
    assert graph_inputs.source_of(node) == "L['x']"


@pytest.mark.parametrize(
    "name",
    [
        "L['model']._fsdp_wrapped_module._flat_param",
        "L['self']._modules['0']._fsdp_param_group",
    ],
)
def test_parameters_of_fsdp_are_refused(name: str) -> None:
    gm = graph_with_input(name, nn.Parameter(torch.ones(1)))
    with pytest.raises(
        CaptureError,
        match=r"managed by FSDP, whose own mixed precision.*MixedPrecision\(Policy\) with "
        r"backend='inductor', or DistributedDataParallel",
    ):
        refuse_unsupported(gm)


def test_tensor_subclass_is_refused_where_the_step_is_called() -> None:
    def step(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(Exception, match=r"L\['x'\]: TwoTensor is a tensor subclass") as caught:
        compile_step(step)(TwoTensor(torch.ones(2), torch.ones(2)))
    assert "Use plain tensors with this backend, or backend='inductor'" in str(caught.value)
    assert "CaptureError" in str(caught.value) or isinstance(caught.value, CaptureError)


def test_graph_under_no_grad_computes_nothing_with_grad() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x * 2)
    assert computes_with_grad(gm)
    with torch.no_grad():
        assert not computes_with_grad(gm)


def test_no_grad_inside_the_graph_is_seen() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.output((graph.call_function(torch.relu, (x,)),))
    assert not computes_with_grad(GraphModule({}, graph))
