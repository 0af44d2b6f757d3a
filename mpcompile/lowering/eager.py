"""Run the rewritten graphs as they stand, each op by its own kernel.

Private torch API, seen in 2.11 to 2.14: ``_prims_common.suggest_memory_format``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from functorch.compile import (
    aot_module_simplified,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch._prims_common import suggest_memory_format
from torch.fx import GraphModule, Node

from mpcompile.lowering.rematerialise import rematerialise
from mpcompile.lowering.rewriter import (
    AOT_CONFIG,
    TRACING_DECOMPOSITIONS,
    Compiled,
    Rewriter,
    keep_saved_values,
)


def lower(gm: GraphModule, inputs: Sequence[Any], rewriter: Rewriter) -> Compiled:
    """Trace ``gm`` with its backward, rewrite, partition, and return what runs it."""

    def partition(joint: GraphModule, args: Sequence[Any], **kwargs: Any) -> Any:
        rewriter.rewrite(joint)
        return min_cut_rematerialization_partition(joint, args, **kwargs)

    def forward(graph: GraphModule, _: Sequence[Any]) -> Compiled:
        return _run_as_is(graph, rewriter, is_backward=False)

    def backward(graph: GraphModule, _: Sequence[Any]) -> Compiled:
        keep_saved_values()
        return _without_dynamo(_run_as_is(graph, rewriter, is_backward=True))

    def inference(graph: GraphModule, _: Sequence[Any]) -> Compiled:
        rewriter.rewrite(graph)
        rematerialise(graph)
        return _run_as_is(graph, rewriter, is_backward=False)

    _lay_out_as_kernels_do(gm)
    with torch._functorch.config.patch(AOT_CONFIG):
        compiled = aot_module_simplified(
            gm,
            inputs,
            fw_compiler=forward,
            bw_compiler=_without_dynamo(backward),
            partition_fn=partition,
            inference_compiler=inference,
            decompositions=TRACING_DECOMPOSITIONS,
            keep_inference_input_mutations=True,
        )
    return _without_dynamo(compiled)


def _run_as_is(graph: GraphModule, rewriter: Rewriter, is_backward: bool) -> Compiled:
    _allow_other_strides(graph)
    boxed: Compiled = make_boxed_func(rewriter.observe(graph, is_backward) or graph.forward)
    return boxed


def _lay_out_as_kernels_do(gm: GraphModule) -> None:
    """Have graphs know how kernels of batch norm lay out what they return: densely.

    Their fakes keep strides of the input instead. What follows would be traced for those, and
    dropout draws its numbers in the order of memory.
    """
    norms = [node for node in gm.graph.nodes if node.target in (torch.batch_norm, F.batch_norm)]
    for node in norms:
        source = node.args[0] if node.args else node.kwargs["input"]
        given = source.meta.get("example_value")
        if isinstance(given, torch.Tensor):
            layout = suggest_memory_format(given)
            if not given.is_contiguous(memory_format=layout):
                _insert_contiguous(node, layout)
    if norms:
        gm.recompile()


def _insert_contiguous(node: Node, layout: torch.memory_format) -> None:
    with node.graph.inserting_after(node):
        dense = node.graph.call_method("contiguous", (node,), {"memory_format": layout})
    dense.meta = dict(node.meta)
    node.replace_all_uses_with(dense, lambda user: user is not dense)


def _allow_other_strides(graph: GraphModule) -> None:
    """Have views copy where strides do not allow one: kernels return others than their fakes.

    Batch norm over a transposed tensor does, seen in torch 2.11 to 2.14; stock ``aot_eager`` fails.
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    graph.recompile()


def _without_dynamo(function: Compiled) -> Compiled:
    """Keep Dynamo from tracing what it has just compiled."""
    disabled: Compiled = torch.compiler.disable(function)
    return disabled
