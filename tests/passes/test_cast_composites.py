"""cast-composites: attention's casts, and the marks that only Dynamo's graph can give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

import mpcompile
from mpcompile.config import Config
from mpcompile.graph import nodes
from mpcompile.graph.pins import Pin, PinScope, pin_of, set_pin
from mpcompile.pass_base import PassContext
from mpcompile.passes import AssignPrecision, CastComposites, FoldCasts, InsertCasts
from mpcompile.precision import Precision
from tests.checking import (
    DynamoTrace,
    Traced,
    assert_same,
    check_disabled_by_name,
    clean,
    decision_of,
    dtypes,
    f32,
    input_dtypes,
    parameter,
    trace_dynamo,
    trace_step,
)

sdpa = F.scaled_dot_product_attention


def heads() -> Tensor:
    return f32(2, 2, 4, 8)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True).relu()


def calls(trace: DynamoTrace, name: str) -> list[Node]:
    return [
        node
        for node in trace.gm.graph.nodes
        if node.target == name or getattr(node.target, "__name__", "") == name
    ]


def left_alone(function: Callable[..., Any], *args: Tensor) -> None:
    trace = trace_dynamo(function, *args)
    before = trace.text
    assert trace.run(CastComposites()) == 0
    assert trace.text == before


def test_attention_gets_16_bit_inputs_and_gives_its_result_back_as_fp32() -> None:
    trace = trace_dynamo(attention, heads(), heads(), heads())
    assert trace.text == clean("""
        %l_q_: ? = placeholder
        %l_k_: ? = placeholder
        %l_v_: ? = placeholder
        %scaled_dot_product_attention: ? = scaled_dot_product_attention(%l_q_, %l_k_, %l_v_, \
is_causal=True)
        %relu: ? = .relu(%scaled_dot_product_attention)
        return [%relu]
    """)
    assert trace.run(CastComposites()) == 1
    assert trace.text == clean("""
        %l_q_: ? = placeholder
        %l_k_: ? = placeholder
        %l_v_: ? = placeholder
        %to: ? = .to(%l_q_, bf16)
        %to_1: ? = .to(%l_k_, bf16)
        %to_2: ? = .to(%l_v_, bf16)
        %scaled_dot_product_attention: ? = scaled_dot_product_attention(%to, %to_1, %to_2, \
is_causal=True)
        %to_3: ? = .to(%scaled_dot_product_attention, f32)
        %relu: ? = .relu(%to_3)
        return [%relu]
    """)


def test_every_dtype_that_the_program_sees_stays() -> None:
    trace = trace_dynamo(attention, heads(), heads(), heads())
    trace.run(CastComposites())
    (result,) = calls(trace, "relu")
    assert result.meta["example_value"].dtype is torch.float32
    assert [value.dtype for value in trace.compute()] == [torch.float32]


def test_graph_without_attention_is_left_alone() -> None:
    left_alone(lambda x: (x @ x).softmax(-1), f32(4, 4))


def test_attention_on_16_bit_inputs_is_left_alone() -> None:
    half = heads().bfloat16()
    left_alone(attention, half, half.clone(), half.clone())


def test_attention_on_float64_inputs_is_left_alone() -> None:
    left_alone(attention, *(heads().double() for _ in range(3)))


def test_dtype_float32_casts_nothing() -> None:
    trace = trace_dynamo(attention, heads(), heads(), heads(), dtype="float32")
    assert trace.run(CastComposites()) == 0


def test_many_readers_of_the_result_all_read_the_widened_one() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = sdpa(q, k, v)
        return found.relu(), found.exp(), found

    trace = trace_dynamo(program, heads(), heads(), heads())
    trace.run(CastComposites())
    (call,) = calls(trace, "scaled_dot_product_attention")
    (wide,) = call.users
    assert wide.target == "to"
    assert len(wide.users) == 3


def test_one_value_as_query_key_and_value_is_cast_once() -> None:
    trace = trace_dynamo(lambda x: sdpa(x, x, x), heads())
    assert trace.run(CastComposites()) == 1
    (call,) = calls(trace, "scaled_dot_product_attention")
    assert len(call.all_input_nodes) == 1
    assert len(calls(trace, "to")) == 2


def test_nested_attention_is_cast_at_each_call() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(sdpa(q, k, v), k, v)

    trace = trace_dynamo(program, heads(), heads(), heads())
    expected = trace.compute()
    assert trace.run(CastComposites()) == 2
    # Two weighted means of rounded values: each rounding is 2**-9 of a value below about 4.
    assert_same(trace.compute(), expected, atol=0.05)


def test_numbers_are_those_of_attention_on_rounded_inputs() -> None:
    q, k, v = heads(), heads(), heads()
    trace = trace_dynamo(attention, q, k, v)
    trace.run(CastComposites())
    by_hand = attention(q.bfloat16(), k.bfloat16(), v.bfloat16()).float()
    assert_same(trace.compute(), [by_hand])


def test_casts_around_attention_are_dropped_where_they_are_needless() -> None:
    weight = parameter(8, 24)
    out = parameter(8, 8)

    def step(x: Tensor) -> Tensor:
        q, k, v = (x @ weight).view(2, 4, 3, 8).permute(2, 0, 1, 3).unsqueeze(2).unbind(0)
        return (sdpa(q, k, v).reshape(2, 4, 8) @ out).square().mean()

    traced = trace_step(step, f32(2, 4, 8))
    traced.run(AssignPrecision(), InsertCasts(), FoldCasts())
    (kernel,) = traced.find("aten._scaled_dot_product_flash_attention_for_cpu")
    assert input_dtypes(kernel) == [torch.bfloat16] * 3
    assert not any(nodes.is_cast(arg) for arg in nodes.input_nodes(kernel))
    (project,) = traced.forward("aten.mm")[1:]
    assert input_dtypes(project) == [torch.bfloat16] * 2


def test_logsumexp_of_attention_stays_fp32() -> None:
    q, k, v = (parameter(2, 2, 4, 8) for _ in range(3))
    traced = trace_step(lambda x: (sdpa(q, k, v) * x).sum(), heads())
    traced.run(AssignPrecision(), InsertCasts(), FoldCasts())
    (kernel,) = traced.find("aten._scaled_dot_product_flash_attention_for_cpu")
    assert [val.dtype for val in nodes.tensor_values(kernel)] == [torch.bfloat16, torch.float32]
    (backward,) = traced.find("aten._scaled_dot_product_flash_attention_for_cpu_backward")
    assert input_dtypes(backward) == [torch.bfloat16] * 5 + [torch.float32]


def test_bool_mask_is_left_alone() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=allowed)

    allowed = torch.ones(4, 4, dtype=torch.bool).tril()
    trace = trace_dynamo(program, heads(), heads(), heads(), allowed)
    expected = trace.compute()
    assert trace.run(CastComposites()) == 1
    (call,) = calls(trace, "scaled_dot_product_attention")
    assert call.kwargs["attn_mask"] in trace.gm.graph.find_nodes(op="placeholder")
    assert_same(trace.compute(), expected, atol=0.05)


def test_float_mask_on_cpu_stays_fp32() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return sdpa(q, k, v, mask)

    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -1e9)
    trace = trace_dynamo(program, heads(), heads(), heads(), mask)
    expected = trace.compute()
    assert trace.run(CastComposites()) == 1
    (call,) = calls(trace, "scaled_dot_product_attention")
    assert call.args[3] in trace.gm.graph.find_nodes(op="placeholder")
    assert_same(trace.compute(), expected, atol=0.05)


def cuda_attention(in_kwargs: bool) -> DynamoTrace:
    """Attention with a float mask as Dynamo would give it for a CUDA device."""
    graph = Graph()
    q, k, v, mask = (graph.placeholder(name) for name in ("q", "k", "v", "mask"))
    with FakeTensorMode():
        for node, shape in (
            (q, (1, 1, 3, 8)),
            (k, (1, 1, 3, 8)),
            (v, (1, 1, 3, 8)),
            (mask, (3, 3)),
        ):
            node.meta["example_value"] = torch.empty(shape, device="cuda")
        result = torch.empty(1, 1, 3, 8, device="cuda")
    args = (q, k, v) if in_kwargs else (q, k, v, mask)
    call = graph.call_function(sdpa, args, {"attn_mask": mask} if in_kwargs else {})
    call.meta["example_value"] = result
    graph.output((call,))
    return DynamoTrace(GraphModule(nn.Module(), graph), PassContext(Config()))


@pytest.mark.parametrize("in_kwargs", [True, False])
def test_float_mask_on_cuda_is_cast_and_its_finite_entries_stay_finite(in_kwargs: bool) -> None:
    trace = cuda_attention(in_kwargs)
    assert trace.run(CastComposites()) == 1
    (call,) = calls(trace, "scaled_dot_product_attention")
    given = call.kwargs["attn_mask"] if in_kwargs else call.args[3]
    assert isinstance(given, Node)
    assert given.meta["example_value"].dtype is torch.bfloat16

    # The graph is right for any device, so the CPU can say what it does to a mask.
    mask = torch.tensor([[0.0, 1.0, -1e38], [torch.finfo(torch.float32).min] * 3, [0, -1e9, 0]])
    mask[0, 1] = float("-inf")
    seen: list[Tensor] = []

    def look(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
        seen.append(attn_mask)
        return q

    call.target = look
    trace.gm.recompile()
    q = f32(1, 1, 3, 8)
    trace.gm(q, q, q, mask)
    assert [value.dtype for value in seen] == [torch.bfloat16]
    assert torch.equal(seen[0].isneginf(), mask.isneginf())


class Rotary(nn.Module):
    """Angles as the transformers library computes them."""

    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 8, 2) / 8))

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        column = self.inv_freq[None, :, None].float().expand(positions.shape[0], -1, 1)
        row = positions[:, None, :].float()
        freqs = (column.float() @ row.float()).transpose(1, 2)
        angles = torch.cat((freqs, freqs), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class RMSNorm(nn.Module):
    """A norm as the transformers library writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, hidden: Tensor) -> Tensor:
        input_dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + 1e-6)
        return self.weight * hidden.to(input_dtype)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.norm = Rotary(), RMSNorm()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rotary(x, positions)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        mixed = sdpa(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        out: Tensor = self.out(self.norm(x + mixed))
        return out


def llama_step() -> Traced:
    model = Llama()
    positions = torch.arange(4)[None].expand(2, 4)
    traced = trace_step(lambda x: model(x, positions).square().mean(), f32(2, 4, 8))
    traced.run(AssignPrecision())
    return traced


def test_rotary_product_stays_fp32_while_rmsnorm_leaves_the_linear_layers_16_bit() -> None:
    traced = llama_step()
    assert traced.precision("aten.bmm") is Precision.FP32
    assert ".float() of the user (test_cast_composites.py:" in traced.reason("aten.bmm")
    layers = traced.forward("aten.addmm")
    assert [decision_of(node).precision for node in layers] == [Precision.HALF] * 2
    assert traced.precisions("aten.mm") == [Precision.HALF] * 4  # their gradients


def test_norm_itself_is_computed_in_fp32() -> None:
    traced = llama_step()
    inside = [
        node
        for node in traced.graph.nodes
        if nodes.module_path(node).endswith("norm") and nodes.is_f32(node)
    ]
    assert {nodes.op_name(node) for node in inside} >= {"aten.pow", "aten.rsqrt", "aten.mul"}
    assert {decision_of(node).precision for node in inside} == {Precision.FP32}


def test_rotary_and_rmsnorm_keep_their_numbers_through_all_passes() -> None:
    model = Llama()
    positions = torch.arange(4)[None].expand(2, 4)
    traced = trace_step(lambda x: model(x, positions).square().mean(), f32(2, 4, 8))
    angles = traced.only("aten.bmm")
    traced.run(AssignPrecision(), InsertCasts(), FoldCasts())
    assert input_dtypes(angles) == [torch.float32] * 2
    assert dtypes(traced.find("aten.cos")) == [torch.float32]


def test_product_of_one_pinned_and_one_free_operand_is_16_bit() -> None:
    weight = parameter(4, 4)
    traced = trace_step(lambda x: (x.float() @ weight).sum(), f32(2, 4))
    traced.run(AssignPrecision())
    assert traced.precision("aten.mm") is Precision.HALF


def test_product_of_two_pinned_operands_is_fp32_forward_and_backward() -> None:
    weight = parameter(4, 4)
    traced = trace_step(lambda x: (x.float() @ weight.float()).sum(), f32(2, 4))
    traced.run(AssignPrecision())
    assert len(traced.find("aten.mm")) > 1
    assert set(traced.precisions("aten.mm")) == {Precision.FP32}


def test_pin_reaches_through_views() -> None:
    weight = parameter(4, 4)

    def step(x: Tensor) -> Tensor:
        rows = x.float().transpose(0, 1).reshape(4, 2)[None].squeeze(0)
        return (rows.t() @ weight.to(torch.float32).t()).sum()

    traced = trace_step(step, f32(2, 4))
    traced.run(AssignPrecision())
    assert traced.precision("aten.mm") is Precision.FP32


def test_pin_ends_behind_the_op_that_reads_it() -> None:
    first, second = parameter(4, 4), parameter(4, 4)

    def step(x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu((x @ first).float())
        return (hidden.relu() @ second).sum()

    traced = trace_step(step, f32(2, 4))
    traced.run(AssignPrecision())
    assert traced.precision("aten.gelu") is Precision.FP32
    products = traced.forward("aten.mm")
    assert [decision_of(node).precision for node in products] == [Precision.HALF] * 2


def test_attention_on_pinned_inputs_keeps_fp32() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q.float(), k.float(), v.float())

    trace = trace_dynamo(program, heads(), heads(), heads())
    assert trace.run(CastComposites()) == 0


def disabled_region(x: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        hidden = torch.tanh(x @ inside)
    return hidden @ outside


def test_region_without_autocast_is_fp32_forward_and_backward() -> None:
    inside, outside = parameter(4, 4), parameter(4, 4)
    traced = trace_step(lambda x: disabled_region(x, inside, outside).sum(), f32(2, 4))
    traced.run(AssignPrecision())
    first, second = traced.forward("aten.mm")
    assert decision_of(first).precision is Precision.FP32
    assert "in autocast(enabled=False) (test_cast_composites.py:" in decision_of(first).reason
    assert decision_of(second).precision is Precision.HALF
    assert traced.precisions("aten.tanh_backward") == [Precision.FP32]
    # x needs no gradient: two for outside and hidden, one for inside.
    gradients = [decision_of(node).precision for node in traced.backward("aten.mm")]
    assert gradients == [Precision.HALF, Precision.HALF, Precision.FP32]


def test_attention_in_a_region_without_autocast_is_left_alone() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return sdpa(q, k, v)

    left_alone(program, heads(), heads(), heads())


def test_region_that_switches_autocast_on_again_is_free() -> None:
    weight = parameter(4, 4)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            first = x @ weight
            with torch.autocast("cpu", enabled=True, dtype=torch.bfloat16):
                second = first.relu() @ weight
        return first.sum() + second.sum()

    trace = trace_dynamo(step, f32(2, 4))
    trace.run(CastComposites())
    scopes = [pin_of(node) for node in calls(trace, "matmul")]
    assert scopes[0] is not None
    assert scopes[0].scope is PinScope.ALL
    assert scopes[1] is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_explicit_16_bit_casts_are_kept_as_written(dtype: torch.dtype) -> None:
    weight = parameter(4, 4)

    def step(x: Tensor) -> Tensor:
        return (x.to(dtype) @ weight.to(dtype)).exp().float().sum()

    traced = trace_step(step, f32(2, 4))
    before = traced.text
    traced.run(AssignPrecision(), InsertCasts(), FoldCasts())
    assert traced.text == before


def test_half_method_is_kept_as_written() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        return (x.half() @ w.half()).float() @ w

    weight = parameter(4, 4)
    traced = trace_step(lambda x: step(x, weight).sum(), f32(2, 4))
    traced.run(AssignPrecision(), InsertCasts(), FoldCasts())
    first, second = traced.forward("aten.mm")
    assert dtypes([first, second]) == [torch.float16, torch.bfloat16]
    assert input_dtypes(first) == [torch.float16] * 2


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "kl_div": lambda h, y: F.kl_div(h, y, reduction="batchmean", log_target=True),
    "cross_entropy": lambda h, y: F.cross_entropy(h, y.argmax(-1)),
    "nll_loss": lambda h, y: F.nll_loss(h, y.argmax(-1)),
    "binary_cross_entropy_with_logits": lambda h, y: F.binary_cross_entropy_with_logits(
        h, (y > 0).float()
    ),
    "cosine_similarity": lambda h, y: F.cosine_similarity(h, y).sum(),
    "hinge_embedding_loss": lambda h, y: F.hinge_embedding_loss(h, y.sign()),
    "poisson_nll_loss": F.poisson_nll_loss,
    "triplet_margin_loss": lambda h, y: F.triplet_margin_loss(h, y, y.flip(0)),
    "margin_ranking_loss": lambda h, y: F.margin_ranking_loss(h, y, y.sign()),
    "soft_margin_loss": lambda h, y: F.soft_margin_loss(h, y.sign()),
    "cosine_embedding_loss": lambda h, y: F.cosine_embedding_loss(h, y, torch.ones(3)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_known_by_name_and_computed_in_fp32(name: str) -> None:
    weight = parameter(4, 4)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return LOSSES[name](x @ weight, y)

    traced = trace_step(step, f32(3, 4), f32(3, 4))
    traced.run(AssignPrecision())
    decided = [
        decision_of(node)
        for node in traced.graph.nodes
        if (pin := pin_of(node)) is not None and pin.why == name and nodes.is_f32(node)
    ]
    assert decided
    assert {item.precision for item in decided} == {Precision.FP32}
    assert any(item.reason == f"part of {name} (autocast CUDA: fp32)" for item in decided)
    assert traced.precision("aten.mm") is Precision.HALF


def test_loss_that_the_table_does_not_name_is_not_marked() -> None:
    trace = trace_dynamo(
        lambda x, y: F.cosine_similarity(x, y), f32(3, 4), f32(3, 4), table="autocast-cpu"
    )
    trace.run(CastComposites())
    assert pin_of(calls(trace, "cosine_similarity")[0]) is None


@pytest.mark.parametrize(
    ("mode", "precision"), [("bilinear", Precision.FP32), ("nearest", Precision.HALF)]
)
def test_interpolation_is_fp32_where_it_computes(mode: str, precision: Precision) -> None:
    first, second = torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3)

    def step(x: Tensor) -> Tensor:
        resized = F.interpolate(first(x), scale_factor=2.0, mode=mode)
        return second(resized).square().mean()  # type: ignore[no-any-return]  # Conv2d is untyped

    traced = trace_step(step, f32(2, 3, 8, 8))
    traced.run(AssignPrecision())
    picked = [node for node in traced.graph.nodes if "index" in nodes.op_name(node)]
    forward = [node for node in picked if not nodes.is_backward(node)]
    assert {decision_of(node).precision for node in forward} == {precision}


def test_wider_mark_is_not_narrowed() -> None:
    node = Graph().placeholder("x")
    set_pin(node, Pin(PinScope.ALL, "first"))
    set_pin(node, Pin(PinScope.READER, "second"))
    assert pin_of(node) == Pin(PinScope.ALL, "first")


def test_marks_leave_other_custom_metadata_alone() -> None:
    node = Graph().placeholder("x")
    node.meta["custom"] = {"other": 1}
    assert pin_of(node) is None
    set_pin(node, Pin(PinScope.READER, "why"))
    assert node.meta["custom"]["other"] == 1
    assert pin_of(node) == Pin(PinScope.READER, "why")


def test_disabled_by_name() -> None:
    check_disabled_by_name(CastComposites(), trace_dynamo(attention, heads(), heads(), heads()))


def test_step_without_the_pass_keeps_the_kernel_of_fp32_inputs() -> None:
    q, k, v = (parameter(2, 2, 4, 8) for _ in range(3))

    def step(x: Tensor) -> Tensor:
        return (sdpa(q, k, v) * x).sum()

    options = {"disable": ["cast-composites"]}
    (region,) = mpcompile.explain(step, heads(), options=options).regions
    assert region.dynamo_graph.before == region.dynamo_graph.after
