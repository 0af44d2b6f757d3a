"""Lower through Inductor: the only file that touches its private interfaces.

Written against torch 2.11 to 2.14: ``compile_fx(inner_compile=, decompositions=, config_patches=)``
and, of its configuration, ``joint_custom_pre_pass``, which sees joint graphs before they are
partitioned and inference graphs too, ``reorder_for_locality``, ``reorder_for_peak_memory`` and
``unsafe_marked_cacheable_functions``. Custom passes are part of the keys of two caches: that of
generated code, whose key is the rewritten graph, and around it AOTAutograd's, whose key is Dynamo's
graph: a hit in the second skips the passes. If no ATen pass runs, the graph takes Inductor's own
decompositions while it is traced, so that all passes off is plain Inductor bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule

from mpcompile.lowering.expand import expand_decompositions
from mpcompile.lowering.rematerialise import rematerialise
from mpcompile.lowering.rewriter import (
    AOT_CONFIG,
    TRACING_DECOMPOSITIONS,
    Compiled,
    Rewriter,
    keep_saved_values,
)

_IN_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
"""Else Inductor moves what starts a bucket to where it is waited for, and gradients behind it."""


def lower(gm: GraphModule, inputs: Sequence[Any], mode: str, rewriter: Rewriter) -> Compiled:
    """Compile ``gm`` with the passes of ``rewriter`` between tracing and partitioning."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph: GraphModule, args: Sequence[Any], **kwargs: Any) -> Any:
        is_backward = bool(kwargs.get("is_backward"))
        rewriter.observe(graph, is_backward)
        if is_backward and any(isinstance(arg, torch.SymInt) for arg in args):
            keep_saved_values()
        if "get_decomp_fn" in kwargs:  # since 2.13: what Inductor traces by itself needs its table
            kwargs["get_decomp_fn"] = _decomposition_table
        with torch._inductor.config.patch(joint_custom_pre_pass=_build_joint_pass(rewriter)):
            return compile_fx_inner(graph, args, **kwargs)

    active, token = rewriter.is_active(), rewriter.cache_token()
    patches = {
        **_mode_patches(mode),
        "joint_custom_pre_pass": _build_joint_pass(rewriter, token),
        "unsafe_marked_cacheable_functions": _cacheable(rewriter),
    }
    if rewriter.keeps_order():
        patches |= _IN_ORDER
    settings = AOT_CONFIG if token else {**AOT_CONFIG, "enable_autograd_cache": False}
    with torch._functorch.config.patch(settings):
        compiled = compile_fx(
            gm,
            inputs,
            inner_compile=inner,
            decompositions=TRACING_DECOMPOSITIONS if active else None,
            config_patches=patches,
        )
    return cast(Compiled, compiled)


def lower_stock(gm: GraphModule, inputs: Sequence[Any], mode: str | None) -> Compiled:
    """Compile ``gm`` as ``backend="inductor"`` would, with nothing of ours in between."""
    from torch._inductor.compile_fx import compile_fx

    return cast(Compiled, compile_fx(gm, inputs, config_patches=_mode_patches(mode)))


def has_cache() -> bool:
    """Whether AOTAutograd's cache is on; an environment variable of torch's switches it off."""
    from torch._inductor import config

    is_disabled = torch.compiler.config.force_disable_caches
    wanted = torch._functorch.config.enable_autograd_cache and config.fx_graph_cache
    return bool(wanted and not is_disabled)


def _mode_patches(mode: str | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def _decomposition_table() -> dict[Any, Any]:
    from torch._inductor.decomposition import select_decomp_table

    table: dict[Any, Any] = select_decomp_table()
    return table


def _cacheable(rewriter: Rewriter) -> dict[str, str]:
    """Return the functions in Dynamo's graphs that do the same whenever their graph is the same."""
    from torch._inductor import config

    known = dict(config.unsafe_marked_cacheable_functions)
    return {**known, **dict.fromkeys(rewriter.functions(), rewriter.cache_key())}


def _build_joint_pass(rewriter: Rewriter, token: str = "") -> Any:
    """Return the custom pass; its ``uuid`` makes our passes part of cache keys, and ``token``."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class JointPass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            gm = graph.owning_module
            assert gm is not None
            rewriter.rewrite(gm)
            if rewriter.is_active():
                expand_decompositions(gm, _decomposition_table())
            rematerialise(gm)

        def uuid(self) -> str:
            return f"{rewriter.cache_key()};{token}"

    return JointPass()
