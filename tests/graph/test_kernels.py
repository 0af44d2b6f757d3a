"""Whether an op takes 16-bit inputs is found by running it, and running it leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from mpcompile.graph import kernels
from mpcompile.graph.kernels import has_half_kernel
from tests.graph.trace import find, record, trace


@pytest.fixture(autouse=True)
def _forget_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_known", {})


def node_of(op: str, function: Callable[..., Any], *inputs: Any) -> Node:
    (node,) = find(trace(function, *inputs).graph, op)
    return node


@pytest.mark.parametrize(
    ("op", "function", "shapes"),
    [
        ("aten._fft_r2c", torch.fft.rfft, [(2, 8)]),
        ("aten.linalg_cholesky_ex", torch.linalg.cholesky, [(3, 3)]),
        ("aten._cdist_forward", lambda x, y: torch.cdist(x, y), [(3, 4), (5, 4)]),
        ("aten._linalg_svd", torch.linalg.svdvals, [(3, 4)]),
    ],
)
def test_kernels_that_fake_tensors_accept_are_refused(
    op: str, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    support = has_half_kernel(
        node_of(op, function, *(torch.ones(shape) for shape in shapes)), torch.bfloat16
    )
    assert not support.ok
    assert "BFloat16" in support.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("op", "function", "shapes"),
    [
        ("aten.mm", torch.mm, [(64, 32), (32, 16)]),
        ("aten.gelu", F.gelu, [(4096, 4096)]),
        ("aten.convolution", F.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3)]),
        ("aten.embedding", lambda w: F.embedding(torch.zeros(2, dtype=torch.long), w), [(5, 4)]),
    ],
)
def test_kernels_that_run_are_accepted(
    op: str, function: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    gm = make_fx(function, tracing_mode="symbolic")(*(torch.ones(shape) for shape in shapes))
    (node,) = find(gm.graph, op)
    support = has_half_kernel(node, dtype)
    assert (support.ok, support.reason) == (True, "ran on a tiny input")


def test_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    node = node_of("aten.mm", torch.mm, torch.ones(2, 2), torch.ones(2, 2))
    first = has_half_kernel(node, torch.bfloat16)
    monkeypatch.setattr(kernels, "_find_support", None)
    assert has_half_kernel(node, torch.bfloat16) is first


@pytest.mark.parametrize(
    ("op", "function", "is_supported"),
    [
        ("aten._cdist_forward", lambda x: torch.cdist(x, x), False),
        ("aten._fft_r2c", torch.fft.rfft, False),
        ("aten.mm", lambda x: torch.mm(x, x), True),
        ("aten.gelu", F.gelu, True),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks the CUDA device that is here")
def test_absent_cuda_is_answered_from_the_shipped_table(
    op: str, function: Callable[..., Any], is_supported: bool
) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = torch.empty(4, 4, device="cuda")
    with mode:
        gm = make_fx(function)(x)
    (node,) = find(gm.graph, op)
    support = has_half_kernel(node, torch.bfloat16)
    assert support.ok is is_supported
    assert "shipped table, as no CUDA device is here" in support.reason


def test_random_state_is_unchanged() -> None:
    def draw(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.bernoulli(x), torch.native_dropout(x, 0.5, True)[0]

    gm = trace(draw, torch.full((4,), 0.5))
    before = torch.get_rng_state()
    for op in ("aten.bernoulli", "aten.native_dropout"):
        has_half_kernel(find(gm.graph, op)[0], torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)


def test_ops_that_check_no_sizes_get_their_own() -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return F.max_pool2d(F.conv2d(x, weight, padding=1), 2).sum()

    x, weight = torch.ones(2, 3, 6, 6), torch.ones(4, 3, 3, 3, requires_grad=True)
    graph = record(forward, x, weight).graphs[0]
    (node,) = find(graph, "aten.max_pool2d_with_indices_backward")
    sizes = [(2, 4, 3, 3), (2, 4, 6, 6), (2, 4, 3, 3)]
    inputs = [arg.meta["val"] for arg in node.all_input_nodes]
    assert kernels._tiny_sizes(node, inputs) is None
    assert kernels._own_sizes(node, inputs) == sizes
    assert has_half_kernel(node, torch.bfloat16).ok


def test_large_input_is_tried_with_one_sample() -> None:
    x, weight = torch.empty(512, 3, 128, 128), torch.ones(4, 3, 3, 3)
    node = node_of("aten.convolution", F.conv2d, x, weight)
    inputs = [arg.meta["val"] for arg in node.all_input_nodes]
    assert kernels._own_sizes(node, inputs) is None
    assert kernels._unit_batch_sizes(node, inputs) == [(1, 3, 128, 128), (4, 3, 3, 3)]
    assert has_half_kernel(node, torch.bfloat16).ok


def test_input_that_cannot_be_made_small_is_left_in_fp32() -> None:
    node = node_of("aten.cumsum", lambda x: x.cumsum(0), torch.empty(5_000_000))
    support = has_half_kernel(node, torch.bfloat16)
    assert (support.ok, support.reason) == (False, "could not be tried on a small input")


def test_traced_values_stay_fake() -> None:
    node = node_of("aten.mm", torch.mm, torch.ones(2, 2), torch.ones(2, 2))
    before = node.meta["val"]
    has_half_kernel(node, torch.bfloat16)
    assert node.meta["val"] is before
    assert torch.is_grad_enabled()
