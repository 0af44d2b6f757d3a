"""assign-precision: what decides for a node, in which order, and the reason that is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from mpcompile.graph import decisions, nodes
from mpcompile.graph.roles import GraphKind
from mpcompile.passes import AssignPrecision, FoldCasts, InsertCasts
from mpcompile.precision import Precision
from tests.checking import (
    Traced,
    assert_same,
    check_disabled_by_name,
    check_left_alone,
    clean,
    decision_of,
    dtypes,
    f32,
    input_dtypes,
    parameter,
    trace_function,
    trace_graphs,
    trace_step,
)

FP32, HALF, FP32_HALF = Precision.FP32, Precision.HALF, Precision.FP32_HALF


def assign(function: Callable[..., Any], *inputs: Tensor) -> Traced:
    """Trace a few ops and decide for them."""
    traced = trace_function(function, inputs)
    traced.run(AssignPrecision())
    return traced


def assign_step(step: Callable[..., Any], *args: Tensor, **options: object) -> Traced:
    """Trace a training step and decide for it."""
    traced = trace_step(step, *args, **options)
    traced.run(AssignPrecision())
    return traced


def cast_all(traced: Traced) -> Traced:
    traced.run(InsertCasts(), FoldCasts())
    return traced


def test_products_are_16_bit_and_what_reads_them_follows_or_widens() -> None:
    traced = trace_function(lambda x, w: ((x @ w).neg() @ w).log(), [f32(4, 4), parameter(4, 4)])
    before = traced.text
    assert before == clean("""
        %x_1: f32[4,4] = placeholder
        %w_1: f32[4,4] = placeholder
        %mm: f32[4,4] = aten.mm(%x_1, %w_1)
        %neg: f32[4,4] = aten.neg(%mm)
        %mm_1: f32[4,4] = aten.mm(%neg, %w_1)
        %log: f32[4,4] = aten.log(%mm_1)
        return %log
    """)
    assert traced.run(AssignPrecision()) == 3
    assert traced.text == before
    written = {
        node.name: decision.precision
        for node in traced.graph.nodes
        if (decision := decisions.get(node)) is not None
    }
    assert written == {"mm": HALF, "neg": HALF, "mm_1": HALF, "log": FP32}


def test_graph_without_products_is_left_alone() -> None:
    check_left_alone(AssignPrecision(), trace_function(lambda x: x.relu().exp() * 2, [f32(4)]))


def test_graph_of_other_dtypes_carries_no_decision() -> None:
    def program(i: Tensor, d: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return i @ i, d @ d, c @ c

    inputs = [
        torch.ones(2, 2, dtype=torch.int64),
        f32(2, 2).double(),
        torch.complex(*[f32(2, 2)] * 2),
    ]
    traced = trace_function(program, inputs)
    check_left_alone(AssignPrecision(), traced)
    assert [node for node in traced.graph.nodes if decisions.get(node)] == []


def test_dtype_float32_decides_nothing() -> None:
    weight = parameter(4, 4)
    traced = trace_step(lambda x: (x @ weight).sum(), f32(2, 4), dtype="float32")
    check_left_alone(AssignPrecision(), traced)


def test_many_readers_of_one_value_are_decided_each_for_itself() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        product = x @ w
        return product.exp(), product @ w, product.softmax(-1), product.relu() @ w

    traced = assign(program, f32(4, 4), parameter(4, 4))
    assert traced.precision("aten.exp") is FP32
    assert traced.precision("aten._softmax") is FP32
    assert traced.precision("aten.relu") is HALF


def test_nested_blocks_stay_16_bit_from_end_to_end() -> None:
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)])
    head = nn.Linear(4, 4)
    traced = assign_step(lambda x: head(layers(x)).square().mean(), f32(2, 4))
    assert set(traced.precisions("aten.gelu")) == {HALF}
    assert set(traced.precisions("aten.addmm")) == {HALF}
    assert set(traced.precisions("aten.gelu_backward")) == {HALF}


def test_numbers_do_not_change_as_only_notes_are_written() -> None:
    weight = parameter(4, 4)
    traced = trace_step(lambda x: (x @ weight).relu().sum(), f32(2, 4))
    expected = traced.compute()
    traced.run(AssignPrecision())
    assert_same(traced.compute(), expected)


def test_disabled_by_name() -> None:
    check_disabled_by_name(AssignPrecision(), trace_function(lambda x: x @ x, [f32(4, 4)]))


def test_every_decision_has_a_reason() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    labels = torch.tensor([0, 1])
    traced = assign_step(lambda x: F.cross_entropy(net(x), labels), f32(2, 3, 4, 4))
    floating = [
        node for node in traced.graph.nodes if node.op == "call_function" and nodes.is_f32(node)
    ]
    reasons = [decision_of(node).reason for node in floating if nodes.op_name(node) != "aten.copy_"]
    assert reasons
    assert all(reasons)


@pytest.mark.parametrize("op", [F.gelu, F.silu, torch.tanh, torch.sigmoid, F.leaky_relu, F.elu])
def test_neutral_op_between_products_follows_its_data(op: Callable[[Tensor], Tensor]) -> None:
    traced = assign(lambda x, w: op(x @ w) @ w, f32(4, 4), parameter(4, 4))
    (product,) = traced.find("aten.mm")[:1]
    (reader, *_) = product.users
    assert decision_of(reader).precision is HALF
    assert decision_of(reader).reason == "neutral, follows %mm"


def test_neutral_op_on_fp32_data_stays_fp32() -> None:
    traced = assign(lambda x, w: F.gelu(x.exp()) @ w, f32(4, 4), parameter(4, 4))
    assert traced.precision("aten.gelu") is FP32
    assert traced.reason("aten.gelu") == "neutral, reads fp32 %exp"


def test_parameter_beside_16_bit_data_does_not_raise_it_and_is_not_rounded() -> None:
    def program(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return ((x @ w) * scale) @ w

    traced = assign(program, f32(4, 4), parameter(4, 4), parameter(4))
    assert traced.precision("aten.mul") is FP32_HALF
    assert traced.reason("aten.mul") == "neutral, %mm meets a parameter or constant"
    cast_all(traced)
    assert input_dtypes(traced.only("aten.mul")) == [torch.float32] * 2
    assert input_dtypes(traced.find("aten.mm")[1]) == [torch.bfloat16] * 2


def test_view_of_a_parameter_is_as_weak_as_the_parameter() -> None:
    def program(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return ((x @ w) * scale.view(1, 4).expand(4, 4)) @ w

    assert assign(program, f32(4, 4), parameter(4, 4), parameter(4)).precision("aten.mul") is (
        FP32_HALF
    )


def test_constant_beside_16_bit_data_does_not_raise_it() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w) * torch.full((4,), 0.5)) @ w

    assert assign(program, f32(4, 4), parameter(4, 4)).precision("aten.mul") is FP32_HALF


def test_data_beside_16_bit_data_raises_it() -> None:
    def program(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
        return ((x @ w) * other) @ w

    traced = assign(program, f32(4, 4), parameter(4, 4), f32(4, 4))
    assert traced.precision("aten.mul") is FP32


def test_0_dim_value_beside_16_bit_data_does_not_raise_it() -> None:
    def program(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return ((x @ w) * scale) @ w

    traced = assign(program, f32(4, 4), parameter(4, 4), torch.tensor(0.5))
    assert traced.precision("aten.mul") is HALF
    cast_all(traced)
    assert input_dtypes(traced.only("aten.mul")) == [torch.bfloat16, torch.float32]


def test_0_dim_result_stays_fp32() -> None:
    traced = assign(lambda x, y: torch.dot(x, y) * (x @ x), f32(4), f32(4))
    assert set(traced.precisions("aten.dot")) == {FP32}


def test_residual_stream_of_16_bit_branches_stays_16_bit() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        stream = x @ w
        stream = stream + stream.relu() @ w
        return stream @ w

    assert assign(program, f32(4, 4), parameter(4, 4)).precision("aten.add") is HALF


def test_residual_stream_that_begins_fp32_stays_fp32() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        stream = x + x @ w
        return (stream + stream @ w).exp()

    traced = assign(program, f32(4, 4), parameter(4, 4))
    assert traced.precisions("aten.add") == [FP32, FP32]
    assert traced.precisions("aten.mm") == [HALF, HALF]


def test_sigmoid_before_a_loss_on_probabilities_is_not_rounded() -> None:
    weight = parameter(4, 4)
    traced = assign_step(
        lambda x, y: F.binary_cross_entropy(torch.sigmoid(x @ weight), y),
        f32(2, 4),
        torch.rand(2, 4),
    )
    assert traced.precision("aten.sigmoid") is FP32
    assert traced.reason("aten.sigmoid") == "neutral, leads to fp32 %binary_cross_entropy"
    assert traced.precision("aten.binary_cross_entropy") is FP32


def test_offset_before_a_layer_norm_is_not_rounded() -> None:
    weight, offset = parameter(4, 4), parameter(4)
    traced = assign_step(
        lambda x: F.layer_norm(x @ weight + offset, (4,)).square().mean(), f32(2, 4)
    )
    assert traced.precision("aten.add") is FP32
    assert traced.reason("aten.add") == "neutral, leads to fp32 %native_layer_norm"


def test_same_offset_before_a_product_is_rounded() -> None:
    def program(x: Tensor, w: Tensor, offset: Tensor) -> Tensor:
        return (x @ w + offset) @ w

    assert assign(program, f32(4, 4), parameter(4, 4), parameter(4)).precision("aten.add") is (
        FP32_HALF
    )


def test_search_for_an_fp32_reader_looks_through_views_and_one_input_ops() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return (torch.tanh(x @ w).t() * 2.0).relu().log()

    traced = assign(program, f32(4, 4), parameter(4, 4))
    assert traced.precision("aten.tanh") is FP32
    assert traced.reason("aten.tanh") == "neutral, leads to fp32 %log"


def test_search_for_an_fp32_reader_ends_at_a_product_and_at_a_join() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ w
        return (torch.tanh(product) @ w).log(), (F.gelu(product) + product).log()

    traced = assign(program, f32(4, 4), parameter(4, 4))
    assert traced.precision("aten.tanh") is HALF
    assert traced.precision("aten.gelu") is HALF


def test_exact_op_before_an_fp32_op_stays_16_bit_since_it_rounds_nothing() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.clamp((x @ w).relu(), max=3.0).exp()

    traced = assign(program, f32(4, 4), parameter(4, 4))
    assert traced.precision("aten.relu") is HALF
    assert traced.precision("aten.clamp") is HALF


def test_value_that_leaves_the_graph_is_not_rounded_on_the_way() -> None:
    traced = assign(lambda x, w: F.gelu(x @ w), f32(4, 4), parameter(4, 4))
    assert traced.precision("aten.gelu") is FP32
    assert traced.reason("aten.gelu") == "neutral, leads to fp32 %output"


def test_chain_longer_than_pythons_stack_is_decided() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        hidden = torch.tanh(x @ w)
        for _ in range(1200):
            hidden = hidden.neg()
        return hidden.exp()

    traced = assign(program, f32(2, 2), parameter(2, 2))
    assert traced.precision("aten.tanh") is FP32
    assert traced.reason("aten.tanh") == "neutral, leads to fp32 %exp"


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(8, 64), nn.Linear(64, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.drop(torch.relu(self.first(x) + 8)))
        return out


def dropout_mask(traced: Traced) -> Tensor:
    """Run the graph and return the mask that dropout drew."""
    (node,) = traced.find("aten.native_dropout")
    (mask,) = [user for user in node.users if user.args[1] == 1]
    output = traced.graph.output_node()
    kept = output.args
    output.args = ((mask,),)
    traced.gm.recompile()
    found = traced.compute()[0]
    output.args = kept
    return found


def test_dropout_draws_the_same_mask_with_and_without_casts() -> None:
    model = Dropped()
    traced = trace_step(lambda x: model(x).square().mean(), f32(4, 8))
    expected = dropout_mask(traced)
    traced.run(AssignPrecision())
    cast_all(traced)
    assert torch.equal(dropout_mask(traced), expected)
    assert 0.3 < expected.double().mean() < 0.7


def test_dropout_is_drawn_in_fp32_and_stored_in_16_bits() -> None:
    model = Dropped()
    traced = assign_step(lambda x: model(x).square().mean(), f32(4, 8))
    assert decision_of(traced.only("aten.native_dropout")).precision is FP32_HALF
    cast_all(traced)
    dropout = traced.only("aten.native_dropout")
    assert input_dtypes(dropout) == [torch.float32]
    (product,) = traced.forward("aten.addmm")[1:]
    assert set(input_dtypes(product)) == {torch.bfloat16}


def test_dropout_step_draws_the_same_bits_as_eager() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        return F.dropout(x @ weight + 100, 0.5) @ torch.eye(8)

    x, weight = f32(16, 8), parameter(8, 8)
    torch.manual_seed(1)
    eager = step(x, weight)
    torch.manual_seed(1)
    compiled = torch.compile(step, backend="mpcompile", options={"lowering": "eager"})
    with torch.no_grad():
        assert torch.equal(compiled(x, weight) == 0, eager == 0)


@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like])
def test_numbers_drawn_like_a_16_bit_value_are_those_of_fp32(
    draw: Callable[[Tensor], Tensor],
) -> None:
    traced = trace_function(lambda x, w: draw((x @ w).relu()), [f32(4, 4), parameter(4, 4)])
    expected = traced.compute()
    traced.run(AssignPrecision())
    cast_all(traced)
    assert_same(traced.compute(), expected)


def normed_step(**options: object) -> Traced:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    return assign_step(lambda x: net(x).square().mean(), f32(2, 3, 4, 4), **options)


def test_batch_norm_passes_16_bit_data_on_and_keeps_statistics_fp32() -> None:
    traced = cast_all(normed_step())
    (norm,) = traced.find("aten._native_batch_norm_legit_functional")
    data, *statistics = sorted(norm.users, key=lambda user: int(str(user.args[1])))
    (second,) = traced.forward("aten.convolution")[1:]
    assert nodes.is_f32(data)
    (rounded,) = data.users
    assert nodes.is_half(rounded)
    assert set(dtypes(statistics)) == {torch.float32}
    assert set(input_dtypes(second)) == {torch.bfloat16}
    assert set(input_dtypes(norm)[1:]) == {torch.float32}


def test_gradient_of_batch_norm_reads_fp32_statistics() -> None:
    traced = cast_all(normed_step())
    backward = traced.only("aten.native_batch_norm_backward")
    assert set(input_dtypes(backward)[2:]) == {torch.float32}
    assert {val.dtype for val in nodes.tensor_values(backward)[1:]} == {torch.float32}


def test_gradient_of_a_16_bit_op_is_16_bit() -> None:
    weight = parameter(4, 4)
    traced = assign_step(lambda x: (F.gelu(x @ weight) @ weight).square().sum(), f32(2, 4))
    (node,) = traced.find("aten.gelu_backward")
    assert decision_of(node).precision is HALF
    assert decision_of(node).reason == "gradient of %gelu"


def test_gradient_of_an_fp32_op_is_fp32() -> None:
    weight = parameter(4, 4)
    traced = assign_step(lambda x: torch.tanh(x @ weight).log().sum(), f32(2, 4))
    (node,) = traced.find("aten.tanh_backward")
    assert decision_of(node).precision is FP32
    assert decision_of(node).reason.startswith("gradient of %tanh (neutral, leads to fp32")


def test_gradients_of_products_are_16_bit_products() -> None:
    weight = parameter(4, 4)
    traced = assign_step(lambda x: (x @ weight @ weight).square().sum(), f32(2, 4))
    assert len(traced.backward("aten.mm")) == 3
    assert set(traced.precisions("aten.mm")) == {HALF}


def test_gradients_that_end_in_parameters_are_fp32_sums() -> None:
    layer = nn.Linear(4, 4)
    traced = assign_step(lambda x: layer(x).square().sum(), f32(2, 4))
    assert [decision_of(node).precision for node in traced.backward("aten.sum")] == [FP32]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.gelu(self.body(x)))
        return out


def net_step(**options: object) -> Traced:
    net = Net()
    return assign_step(lambda x: net(x).square().mean(), f32(2, 4), **options)


def products(traced: Traced) -> list[Precision]:
    return [decision_of(node).precision for node in traced.forward("aten.addmm")]


def test_keep_fp32_by_op_covers_forward_and_backward() -> None:
    traced = net_step(keep_fp32=["aten.addmm"])
    assert products(traced) == [FP32] * 3
    assert set(traced.precisions("aten.mm")) == {FP32}
    reasons = {decision_of(node).reason for node in traced.forward("aten.addmm")}
    assert reasons == {"keep_fp32='aten.addmm'"}


def test_keep_fp32_by_overload_names_the_op_too() -> None:
    assert products(net_step(keep_fp32=["aten.addmm.default"])) == [FP32] * 3


def test_keep_half_by_op_overrules_the_table() -> None:
    traced = assign_step(
        lambda x, w: (x @ w).softmax(-1).sum(),
        f32(4, 4),
        parameter(4, 4),
        keep_half=["aten._softmax"],
    )
    assert traced.precision("aten._softmax") is HALF
    assert traced.reason("aten._softmax") == "keep_half='aten._softmax'"


@pytest.mark.parametrize("pattern", ["*body.0", "*body.?", "net.body.0", "net.body", "net.*.0"])
def test_keep_fp32_by_module_glob(pattern: str) -> None:
    traced = net_step(keep_fp32=[pattern])
    assert products(traced)[0] is FP32
    assert products(traced)[2] is HALF


def test_keep_fp32_by_module_covers_its_backward_nodes() -> None:
    traced = net_step(keep_fp32=["net.head"])
    inside = [
        node
        for node in traced.backward("aten.mm")
        if decision_of(node).reason == "keep_fp32='net.head'"
    ]
    assert len(inside) == 2
    assert {decision_of(node).precision for node in inside} == {FP32}
    assert traced.precisions("aten.mm").count(HALF) == 3  # x needs no gradient


def line_of(text: str) -> str:
    """Return ``file.py:12`` of the line in this file that ends in a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [index for index, line in enumerate(lines, 1) if line.endswith(f"  # {text}")]
    return f"{Path(__file__).name}:{number}"


def two_lines(x: Tensor, w: Tensor) -> Tensor:
    first = x @ w  # the line that is kept
    return (first.relu() @ w).sum()


def test_keep_fp32_by_source_line_covers_forward_and_backward() -> None:
    line = line_of("the line that is kept")
    traced = assign_step(two_lines, f32(4, 4), parameter(4, 4), keep_fp32=[line])
    first, second = traced.forward("aten.mm")
    assert decision_of(first).precision is FP32
    assert decision_of(first).reason == f"keep_fp32='{line}'"
    assert decision_of(second).precision is HALF
    assert [decision_of(node).precision for node in traced.backward("aten.mm")] == [
        HALF,
        HALF,
        FP32,
    ]


@pytest.mark.parametrize("pattern", ["addmm_1", "%addmm_1"])
def test_keep_fp32_by_node_name(pattern: str) -> None:
    assert products(net_step(keep_fp32=[pattern])) == [HALF, FP32, HALF]


def test_node_beats_module_and_module_beats_op() -> None:
    options = {"keep_fp32": ["aten.addmm", "addmm_1"], "keep_half": ["net.body"]}
    assert products(net_step(**options)) == [HALF, FP32, FP32]


def test_line_beats_module_and_node_beats_line() -> None:
    line = line_of("the line that is kept")

    def step(x: Tensor, w: Tensor) -> Tensor:
        return two_lines(x, w)

    options = {"keep_fp32": [line], "keep_half": ["aten.mm"]}
    traced = assign_step(step, f32(4, 4), parameter(4, 4), **options)
    assert [decision_of(node).precision for node in traced.forward("aten.mm")] == [FP32, HALF]
    options = {"keep_fp32": [line], "keep_half": ["mm"]}
    traced = assign_step(step, f32(4, 4), parameter(4, 4), **options)
    assert [decision_of(node).precision for node in traced.forward("aten.mm")] == [HALF, HALF]


def test_override_beats_a_pin() -> None:
    weight = parameter(4, 4)
    traced = assign_step(
        lambda x: (x.float() @ weight.float()).sum(), f32(2, 4), keep_half=["aten.mm"]
    )
    assert traced.precision("aten.mm") is HALF


def test_override_does_not_touch_data_movement() -> None:
    traced = net_step(keep_half=["aten.t"])
    assert "keep_half" not in decision_of(traced.forward("aten.t")[0]).reason


def test_overrides_that_named_a_node_are_noted() -> None:
    traced = net_step(keep_fp32=["net.head", "net.nowhere"])
    assert traced.ctx.used_overrides == {"net.head"}


def test_assignment_that_a_report_wrote_gives_the_same_graph(tmp_path: Path) -> None:
    net = Net()

    def step(x: Tensor) -> Tensor:
        loss: Tensor = net(x).square().mean()
        loss.backward()
        return loss.detach()

    x = f32(2, 4)
    options = {"keep_fp32": ["net.body.0"], "keep_half": ["aten.mean"]}
    report = mpcompile.explain(step, x, options=options)
    path = tmp_path / "assignment.json"
    report.save_assignment(path)
    assert json.loads(path.read_text()) == report.assignment()
    for given in (str(path), report.assignment()):
        again = mpcompile.explain(step, x, options={"assignment": given})
        for old, new in zip(report.regions, again.regions, strict=True):
            assert new.graph.after == old.graph.after
        reasons = {entry["reason"] for entry in again.assignment()}
        assert "assignment read from file" in reasons


def test_edited_assignment_changes_one_node() -> None:
    net = Net()

    def step(x: Tensor) -> Tensor:
        loss: Tensor = net(x).square().mean()
        return loss

    x = f32(2, 4)
    entries = mpcompile.explain(step, x).assignment()
    for entry in entries:
        entry["precision"] = "fp32" if entry["node"] == "addmm_1" else entry["precision"]
    again = mpcompile.explain(step, x, options={"assignment": entries})
    found = {entry["node"]: entry["precision"] for entry in again.assignment()}
    assert (found["addmm"], found["addmm_1"], found["addmm_2"]) == ("half", "fp32", "half")


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "aten._fft_r2c": lambda h: torch.fft.rfft(h).abs(),
    "aten._cdist_forward": lambda h: torch.cdist(h, h),
    "aten.linalg_cholesky_ex": lambda h: torch.linalg.cholesky(h @ h.t()),
    "aten._linalg_svd": torch.linalg.svdvals,
    "aten.linalg_inv_ex": torch.linalg.inv,
}


@pytest.mark.parametrize("table", ["painted", "autocast-cuda", "autocast-cpu"])
@pytest.mark.parametrize("op", KERNELS)
def test_op_without_a_16_bit_kernel_stays_fp32_in_every_table(op: str, table: str) -> None:
    with torch.no_grad():
        (traced,) = trace_graphs(
            lambda x, w: KERNELS[op](x @ w), f32(4, 4), parameter(4, 4), table=table
        )
    traced.run(AssignPrecision())
    assert op in {nodes.op_name(node) for node in traced.graph.nodes}
    for node in traced.find(op):
        decision = decisions.get(node)
        assert decision is None or decision.precision is FP32
    cast_all(traced)
    traced.compute()


@pytest.mark.parametrize("op", ["aten._cdist_forward", "aten.linalg_inv_ex"])
def test_kernel_that_is_missing_beats_the_users_override(op: str) -> None:
    with torch.no_grad():
        (traced,) = trace_graphs(
            lambda x, w: KERNELS[op](x @ w), f32(4, 4), parameter(4, 4), keep_half=[op]
        )
    traced.run(AssignPrecision())
    (node,) = traced.find(op)
    assert decision_of(node).precision is FP32
    assert decision_of(node).reason.startswith("no torch.bfloat16 kernel (")


def test_optimizer_graph_is_left_alone() -> None:
    weight = parameter(4, 4)
    weight.grad = f32(4, 4)
    momentum = f32(4, 4)

    def step() -> None:
        with torch.no_grad():
            assert weight.grad is not None
            momentum.mul_(0.9).add_(weight.grad @ weight.grad)
            weight.sub_(momentum, alpha=0.1)

    (traced,) = trace_graphs(step)
    assert traced.roles.kind is GraphKind.UPDATE
    check_left_alone(AssignPrecision(), traced)
    assert [node for node in traced.graph.nodes if decisions.get(node)] == []


def test_inference_graph_is_rewritten() -> None:
    net = Net()
    with torch.no_grad():
        (traced,) = trace_graphs(lambda x: net(x), f32(2, 4))
    assert traced.roles.kind is GraphKind.INFERENCE
    assert traced.run(AssignPrecision()) > 0
    assert products(traced) == [HALF] * 3


def test_autocast_table_lets_a_parameter_raise_16_bit_data() -> None:
    scale, weight = parameter(4), parameter(4, 4)

    def step(x: Tensor) -> Tensor:
        return (((x @ weight) * scale) @ weight).sum()

    assert assign_step(step, f32(2, 4), table="painted").precision("aten.mul") is FP32_HALF
    assert assign_step(step, f32(2, 4), table="autocast-cuda").precision("aten.mul") is FP32
