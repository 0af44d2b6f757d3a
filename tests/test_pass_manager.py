"""The manager: order, toggles, records, and what the verifier catches of a bad pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from mpcompile.config import Config
from mpcompile.errors import GraphVerifyError, PassError
from mpcompile.graph import nodes
from mpcompile.pass_base import GraphPass, PassContext, Stage
from mpcompile.pass_manager import PassManager
from mpcompile.passes import AssignPrecision, FoldCasts, InsertCasts
from tests.checking import Traced, f32, trace_function, trace_step

aten = torch.ops.aten


@dataclass(frozen=True)
class Planted(GraphPass):
    """A pass that does what a test asks for."""

    name: ClassVar[str] = "fold-casts"  # a name that the options know
    stage: ClassVar[Stage] = Stage.ATEN
    exact: ClassVar[bool] = True
    off: ClassVar[str] = "nothing"

    rewrite: Callable[[Graph], int] = lambda graph: 0

    def run(self, gm: GraphModule, ctx: PassContext) -> int:
        return self.rewrite(gm.graph)


class First(Planted):
    name: ClassVar[str] = "insert-casts"


class Second(Planted):
    name: ClassVar[str] = "fold-casts"
    runs_after: ClassVar[tuple[str, ...]] = ("insert-casts",)


class OnDynamo(Planted):
    name: ClassVar[str] = "cast-composites"
    stage: ClassVar[Stage] = Stage.DYNAMO


def small() -> Traced:
    return trace_function(lambda x, y: (x.exp() + y).relu(), [f32(2, 4), f32(2, 4)])


def run(traced: Traced, *passes: GraphPass, **options: Any) -> list[Any]:
    manager = PassManager(passes, Config(**options))
    return manager.run(Stage.ATEN, traced.gm, traced.ctx)


def double_relu(graph: Graph) -> int:
    """Append a second relu: valid, and visible types stay."""
    (node,) = graph.find_nodes(op="call_function", target=aten.relu.default)
    made = nodes.call_after(node, aten.relu.default, (node,), {})
    graph.output_node().replace_input_with(node, made)
    return 1


def test_wrong_order_is_an_error() -> None:
    with pytest.raises(ValueError, match="pipeline: fold-casts must run after insert-casts"):
        PassManager([Second(), First()], Config())


def test_pass_may_run_without_one_that_it_would_run_after() -> None:
    PassManager([Second()], Config())


def test_passes_run_in_the_order_given() -> None:
    seen: list[str] = []

    def note(name: str) -> Callable[[Graph], int]:
        def rewrite(_: Graph) -> int:
            seen.append(name)
            return 0

        return rewrite

    run(small(), First(note("first")), Second(note("second")))
    assert seen == ["first", "second"]


def test_records_say_what_each_pass_did() -> None:
    traced = small()
    before = traced.text
    records = run(traced, First(), Second(double_relu))
    assert [record.name for record in records] == ["insert-casts", "fold-casts"]
    assert [record.rewrites for record in records] == [0, 1]
    assert [record.after for record in records] == [before, traced.text]
    assert before != traced.text
    assert all(record.enabled for record in records)
    assert all(record.stage is Stage.ATEN for record in records)
    assert all(record.time_us > 0 for record in records)


def test_time_of_a_record_is_that_of_the_pass() -> None:
    def sleep(_: Graph) -> int:
        import time

        time.sleep(0.02)
        return 0

    quick, slow = run(small(), First(), Second(sleep))
    assert slow.time_us >= 20_000
    assert quick.time_us < slow.time_us


def test_disabled_pass_does_not_run_and_is_recorded_as_off() -> None:
    traced = small()
    before = traced.text
    (record,) = run(traced, Second(double_relu), disable=("fold-casts",))
    assert (record.enabled, record.rewrites, record.time_us) == (False, 0, 0.0)
    assert record.after == before == traced.text


def test_pass_of_another_stage_does_not_run_and_is_not_recorded() -> None:
    traced = small()
    records = run(traced, OnDynamo(double_relu), Second())
    assert [record.name for record in records] == ["fold-casts"]


def test_manager_knows_whether_a_stage_is_rewritten_at_all() -> None:
    passes = [OnDynamo(), Second()]
    assert PassManager(passes, Config()).rewrites(Stage.ATEN)
    off = PassManager(passes, Config(disable=("fold-casts",)))
    assert not off.rewrites(Stage.ATEN)
    assert off.rewrites(Stage.DYNAMO)
    assert not off.is_enabled("fold-casts")


def test_rewritten_module_runs_the_rewritten_graph() -> None:
    def twice(graph: Graph) -> int:
        (node,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
        node.args = (node.args[1], node.args[1])
        return 1

    traced = small()
    run(traced, Second(twice))
    x, y = f32(2, 4), f32(2, 4)
    assert torch.equal(traced.gm(x, y), (y + y).relu())


def test_cache_key_differs_with_toggles_options_and_tables() -> None:
    passes = [AssignPrecision(), InsertCasts(), FoldCasts()]
    configs = [
        Config(),
        Config(disable=("fold-casts",)),
        Config(table="autocast-cpu"),
        Config(dtype=torch.float32),
        Config(keep_fp32=("aten.mm",)),
        Config(keep_half=("aten.mm",)),
    ]
    keys = [PassManager(passes, config).cache_key() for config in configs]
    assert len(set(keys)) == len(keys)
    assert keys[0] == PassManager(passes, Config()).cache_key()


def test_cache_key_holds_what_the_passes_print_as() -> None:
    key = PassManager([AssignPrecision(), FoldCasts()], Config(disable=("fold-casts",))).cache_key()
    assert "AssignPrecision()" in key
    assert "FoldCasts()" not in key


def test_recorded_type_that_the_op_does_not_give_is_caught() -> None:
    def lie(graph: Graph) -> int:
        (node,) = graph.find_nodes(op="call_function", target=aten.exp.default)
        nodes.set_value(node, nodes.value(node).to(torch.bfloat16))
        return 1

    message = (
        r"fold-casts: %exp: bf16\[2,4\] = .* is recorded as bf16\[2,4\] but its inputs give f32"
    )
    with pytest.raises(GraphVerifyError, match=message):
        run(small(), Second(lie), verify_graph=True)


def test_value_that_was_not_refreshed_is_caught() -> None:
    def forget(graph: Graph) -> int:
        (x, _) = graph.find_nodes(op="placeholder")
        (exp,) = x.users
        made = nodes.insert_cast(x, torch.bfloat16, exp)
        exp.replace_input_with(x, made)
        return 1

    with pytest.raises(GraphVerifyError, match="the rewrite forgot to refresh it"):
        run(small(), Second(forget), verify_graph=True)


def narrow_output(graph: Graph) -> int:
    (node,) = graph.find_nodes(op="call_function", target=aten.relu.default)
    made = nodes.insert_cast(node, torch.bfloat16, node)
    graph.output_node().replace_input_with(node, made)
    return 1


@pytest.mark.parametrize("verify", [True, False])
def test_visible_dtype_that_changed_is_caught_with_and_without_the_verifier(verify: bool) -> None:
    message = (
        r"fold-casts: output 0 was torch.float32\[2, 4\].*became torch.bfloat16\[2, 4\].*disable"
    )
    with pytest.raises(GraphVerifyError, match=message):
        run(small(), Second(narrow_output), verify_graph=verify)


@pytest.mark.parametrize("verify", [True, False])
def test_visible_strides_that_changed_are_caught(verify: bool) -> None:
    def turn(graph: Graph) -> int:
        (node,) = graph.find_nodes(op="call_function", target=aten.relu.default)
        made = nodes.insert_strided_copy(node, (2, 4), (1, 2))
        graph.output_node().replace_input_with(node, made)
        return 1

    with pytest.raises(GraphVerifyError, match=r"strides \[4, 1\].*strides \[1, 2\]"):
        run(small(), Second(turn), verify_graph=verify)


def test_dtype_of_a_written_buffer_that_changed_is_caught() -> None:
    norm = torch.nn.BatchNorm1d(4)
    traced = trace_step(lambda x: norm(x).square().mean(), f32(2, 4))

    def narrow(graph: Graph) -> int:
        writes = graph.find_nodes(op="call_function", target=aten.copy_.default)
        written = writes[-1].args[1]
        made = nodes.insert_cast(written, torch.bfloat16, writes[-1])
        writes[-1].replace_input_with(written, made)
        return 1

    with pytest.raises(
        GraphVerifyError, match=r"what is written to %primals_\d+ was torch.float32"
    ):
        run(traced, Second(narrow))


@pytest.mark.parametrize("verify", [True, False])
def test_pass_that_reports_no_rewrite_but_changed_the_graph_is_caught(verify: bool) -> None:
    def sneak(graph: Graph) -> int:
        return double_relu(graph) - 1

    with pytest.raises(GraphVerifyError, match="fold-casts: reported no rewrite but changed"):
        run(small(), Second(sneak), verify_graph=verify)


def test_malformed_graph_is_caught() -> None:
    def misplace(graph: Graph) -> int:
        (exp,) = graph.find_nodes(op="call_function", target=aten.exp.default)
        (relu,) = graph.find_nodes(op="call_function", target=aten.relu.default)
        relu.append(exp)  # behind its reader
        return 1

    with pytest.raises(GraphVerifyError, match="fold-casts: the rewritten graph is malformed"):
        run(small(), Second(misplace), verify_graph=True)


def test_op_that_cannot_take_its_inputs_is_caught_with_advice() -> None:
    def mix_up(graph: Graph) -> int:
        (product,) = graph.find_nodes(op="call_function", target=aten.mm.default)
        product.args = (product.args[1], product.args[0])
        return 1

    traced = trace_function(lambda x, y: x @ y, [f32(2, 4), f32(4, 3)])
    message = r"(?s)%mm.*cannot take its inputs f32\[4,3\], f32\[2,4\].*keep_fp32.*aten.mm"
    with pytest.raises(GraphVerifyError, match=message):
        run(traced, Second(mix_up), verify_graph=True)


def test_error_of_the_verifier_is_an_error_of_a_pass() -> None:
    assert issubclass(GraphVerifyError, PassError)


def test_error_of_a_pass_reaches_the_caller_and_later_passes_do_not_run() -> None:
    def fail(_: Graph) -> int:
        raise PassError("planted")

    def never(_: Graph) -> int:
        raise AssertionError

    with pytest.raises(PassError, match="planted"):
        run(small(), First(fail), Second(never))


def test_verified_pass_that_is_right_passes() -> None:
    weight = torch.nn.Parameter(f32(4, 4))

    def step(x: Tensor) -> Tensor:
        return (x @ weight).relu().square().mean()

    traced = trace_step(step, f32(2, 4))
    records = run(traced, AssignPrecision(), InsertCasts(), FoldCasts(), verify_graph=True)
    assert [record.rewrites > 0 for record in records[:2]] == [True, True]
