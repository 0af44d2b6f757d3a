"""The text that stands for a region: equal for equal graphs, and different for all that counts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from mpcompile.capture.region_key import IndescribableError, describe

SOURCE = """
import sys, torch
from torch import nn
from mpcompile.capture.region_key import describe

def backend(gm, inputs):
    sys.stdout.write(describe(gm, inputs))
    return gm.forward

model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
torch.compile(model, backend=backend)(torch.randn(2, 4))
"""


def text_of(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> str:
    """Return the text of the one graph of ``function``."""
    texts: list[str] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        texts.append(describe(gm, inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    (text,) = texts
    return text


def test_text_is_the_same_in_another_process() -> None:
    command = [sys.executable, "-c", SOURCE]
    done = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)]
    assert done[0].stdout == done[1].stdout
    assert "gelu" in done[0].stdout


def scaled(x: Tensor) -> Tensor:
    return x * 2.0


def scaled_otherwise(x: Tensor) -> Tensor:
    return x * 3.0


def scaled_elsewhere(x: Tensor) -> Tensor:

    return x * 2.0


def test_equal_graphs_have_equal_texts() -> None:
    assert text_of(scaled, torch.ones(3)) == text_of(scaled, torch.zeros(3))


def test_what_the_process_has_counted_so_far_does_not_show() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    texts = set()
    for count in (3, 40):
        for node in gm.graph.nodes:
            node.meta["seq_nr"] = count
        texts.add(describe(gm, [torch.ones(2)]))
    assert len(texts) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: text_of(scaled_otherwise, torch.ones(3)),
        lambda: text_of(scaled_elsewhere, torch.ones(3)),
        lambda: text_of(scaled, torch.ones(4)),
        lambda: text_of(scaled, torch.ones(3, dtype=torch.float64)),
        lambda: text_of(scaled, torch.ones(3, requires_grad=True)),
        lambda: text_of(scaled, torch.ones(3), dynamic=True),
        lambda: text_of(scaled, torch.ones(6)[::2]),
        lambda: text_of(torch.no_grad()(scaled), torch.ones(3)),
    ],
    ids=["constant", "line", "shape", "dtype", "requires_grad", "symbols", "strides", "grad mode"],
)
def test_what_differs_shows(other: Callable[[], str]) -> None:
    assert other() != text_of(scaled, torch.ones(3))


def test_sizes_of_the_moment_show_where_they_are_symbols() -> None:
    texts = {text_of(scaled, torch.ones(size), dynamic=True) for size in (3, 4)}
    assert len(texts) == 2


def test_settings_of_torch_show() -> None:
    before = text_of(scaled, torch.ones(3))
    with torch._inductor.config.patch(max_fusion_size=7):
        assert text_of(scaled, torch.ones(3)) != before
    assert text_of(scaled, torch.ones(3)) == before


def test_module_of_a_node_shows() -> None:
    class Outer(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            self.add_module(name, nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.get_submodule(self.name)(x)
            return out

    assert text_of(Outer("one"), torch.ones(3)) != text_of(Outer("two"), torch.ones(3))


def test_tensor_in_a_graph_has_no_text() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x)
    gm.register_buffer("held", torch.ones(2))
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.get_attr("held")
    with pytest.raises(IndescribableError, match="held"):
        describe(gm, [torch.ones(2)])


def test_object_of_an_unknown_class_among_arguments_has_no_text() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x)
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(torch.relu, (object(),))  # type: ignore[arg-type]
    with pytest.raises(IndescribableError, match="object"):
        describe(gm, [torch.ones(2)])
