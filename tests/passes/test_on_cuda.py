"""Graphs of CUDA tensors are rewritten as CUDA wants it; no card is needed for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from mpcompile.graph import decisions, kernels, nodes
from mpcompile.graph.verify import verify_graph, visible_types
from mpcompile.pass_base import Stage
from mpcompile.passes import CastComposites
from mpcompile.pipeline import build_manager
from tests import fake_cuda
from tests.checking import Traced, trace_dynamo, trace_step

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def _forget_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_known", {})


def _on_cuda(step: Callable[..., Any], *args: Any, **options: object) -> Traced:
    """Return the joint graph of ``step`` for CUDA tensors, after the ATen passes."""
    traced = trace_step(step, *args, **options)
    fake_cuda.moved_to_cuda(traced.gm)
    visible = visible_types(traced.graph)
    build_manager(traced.ctx.config).run(Stage.ATEN, traced.gm, traced.ctx)
    verify_graph(traced.graph, visible, "test")
    return traced


def _tensors(node: Node) -> list[Tensor]:
    return [val for val in tree_leaves(node.meta.get("val")) if isinstance(val, Tensor)]


class Net(nn.Module):
    """Layers that have 16-bit kernels on CUDA, and operations that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.inner = nn.Linear(8, 16)
        self.layer_norm = nn.LayerNorm(16)
        self.outer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x))).mean((2, 3))
        x = self.outer(self.layer_norm(F.gelu(self.inner(x))))
        spectrum = torch.fft.rfft(x @ x.t()).abs().sum()
        symmetric = x.t() @ x + torch.eye(16) * 16
        factor = torch.linalg.cholesky(symmetric).diagonal().sum()
        distance = torch.cdist(x, x.flip(0)).sum()
        loss: Tensor = x.square().mean() + 1e-3 * (spectrum + factor + distance)
        return loss


def _joint() -> Traced:
    model = Net()
    return _on_cuda(lambda x: model(x), torch.randn(4, 3, 8, 8))


def test_everything_is_on_cuda() -> None:
    for node in _joint().graph.nodes:
        found = {val.device.type for val in _tensors(node) if val.numel()}  # order tokens are empty
        assert found <= {"cuda"}, node.format_node()


def test_products_run_in_16_bits() -> None:
    traced = _joint()
    products = [node for op in ("aten.convolution", "aten.addmm") for node in traced.find(op)]
    assert len(products) >= 3
    for node in products:
        assert {val.dtype for arg in node.all_input_nodes for val in _tensors(arg)} == {HALF}


def test_no_op_gets_a_dtype_that_its_cuda_kernel_lacks() -> None:
    traced = _joint()
    lacking = [n for n in traced.graph.nodes if nodes.op_name(n) in kernels._ABSENT_CUDA]
    assert {"aten._fft_r2c", "aten.linalg_cholesky_ex", "aten._cdist_forward"} <= {
        nodes.op_name(node) for node in lacking
    }
    for node in lacking:
        found = [val.dtype for arg in node.all_input_nodes for val in _tensors(arg)]
        assert HALF not in found, node.format_node()


def test_reason_says_that_no_card_was_asked() -> None:
    model = Net()
    traced = _on_cuda(
        lambda x: model(x), torch.randn(4, 3, 8, 8), keep_half=["aten.linalg_cholesky_ex"]
    )
    (node,) = traced.find("aten.linalg_cholesky_ex")
    decision = decisions.get(node)
    assert decision is not None
    assert not decision.precision.stores_half
    if not torch.cuda.is_available():
        assert "shipped table" in decision.reason


def test_partition_saves_16_bit_activations_of_cuda() -> None:
    traced = _joint()
    joint = traced.gm
    outputs = len(tree_leaves(joint.graph.output_node().args[0]))
    primals = [n for n in joint.graph.find_nodes(op="placeholder") if "tangents" not in n.name]
    args = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    num_forward = outputs - len(primals)
    forward, backward = min_cut_rematerialization_partition(
        joint, args, num_fwd_outputs=num_forward, static_lifetime_input_indices=[]
    )
    saved = [val for n in backward.graph.find_nodes(op="placeholder") for val in _tensors(n)]
    assert any(val.dtype is HALF for val in saved)
    assert {val.device.type for val in saved} == {"cuda"}
    assert isinstance(forward, GraphModule)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("rewrites", "kernel"),
    [
        (True, "aten._scaled_dot_product_flash_attention.default"),
        (False, "aten._scaled_dot_product_efficient_attention.default"),
    ],
)
def test_attention_reaches_the_flash_kernel_through_cast_composites(
    rewrites: bool, kernel: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fake_cuda.install(tmp_path_factory.getbasetemp())
    trace = trace_dynamo(_attention, *(torch.randn(2, 4, 16, 64) for _ in range(3)))
    assert (trace.run(CastComposites()) if rewrites else 1) == 1
    with FakeTensorMode():
        inputs = [
            torch.empty(2, 4, 16, 64, device="cuda", requires_grad=True) for _ in trace.inputs
        ]
        gm = make_fx(lambda *args: trace.gm(*args))(*inputs)
    assert kernel in {str(node.target) for node in gm.graph.nodes}
    (result,) = tree_leaves(gm.graph.output_node().args[0])
    assert result.meta["val"].dtype is torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_step_on_a_card_is_near_fp32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    x, y = torch.randn(32, 64).cuda(), torch.arange(32).cuda() % 8
    compiled = torch.compile(step, backend="mpcompile")
    losses = [compiled(x, y).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(F.cross_entropy(model(x), y).item(), abs=1.0)
