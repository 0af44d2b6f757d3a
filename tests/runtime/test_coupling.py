"""Optimizers with sums over all parameters run as kernels; other couplings run as eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpcompile.codegen.expr import Apply, apply, constant, load, reduce, scalar
from mpcompile.errors import CodegenError
from mpcompile.runtime import update as update_module
from mpcompile.runtime.coupling import Coupled, Couplings, Total, localize
from mpcompile.runtime.grads import ClipNorm, GradPlan
from mpcompile.runtime.update import OptimizerUpdate
from tests.runtime import coupled
from tests.runtime.updating import parameters, relative_difference, set_grads

FUSED = [
    coupled.GlobalNorm,
    coupled.ClippedLamb,
    coupled.ClippingAdam,
    coupled.BranchesOnNorm,
    coupled.LargestNorm,
    coupled.NormOfUpdates,
]
SHAPES = ((3, 4), (7,), (130, 150), (5, 1, 3), (1,), (), (0,), (4, 5))


def _optimizer(cls: Any, params: list[torch.nn.Parameter], groups: int) -> torch.optim.Optimizer:
    split = [{"params": params[k::groups], "lr": 0.01 * (k + 1)} for k in range(groups)]
    optimizer: torch.optim.Optimizer = cls(split)
    return optimizer


def _beside_eager(
    cls: Any, groups: int = 1, steps: int = 6, without: int | None = None, **plan: Any
) -> tuple[float, OptimizerUpdate, list[bool]]:
    """Return how far parameters and gradients are from eager's, and which steps were fused."""
    lists = [parameters(SHAPES), parameters(SHAPES)]
    eager, fused = (_optimizer(cls, params, groups) for params in lists)
    update, was_fused = OptimizerUpdate(fused), []
    for step in range(steps):
        set_grads(step, *lists)
        for params in lists if without is not None else ():
            params[without or 0].grad = None
        eager.step()
        was_fused.append(update.run(plan=GradPlan(write=True, **plan)).fused)
    grads = [[p.grad for p in params if p.grad is not None] for params in lists]
    return max(relative_difference(*lists), relative_difference(*grads)), update, was_fused


@pytest.mark.parametrize("cls", FUSED)
@pytest.mark.filterwarnings("error")
def test_totals_over_all_parameters_are_fused(cls: Any) -> None:
    difference, update, fused = _beside_eager(cls)
    assert all(fused[1:]), update.reason
    assert difference <= 1e-6


@pytest.mark.parametrize("cls", [coupled.GlobalNorm, coupled.ClippedLamb, coupled.ClippingAdam])
def test_totals_reach_across_groups(cls: Any) -> None:
    difference, update, fused = _beside_eager(cls, groups=2)
    assert all(fused[1:]), update.reason
    assert difference <= 1e-6


def test_parameter_without_gradient_is_no_part_of_a_total_of_gradients() -> None:
    difference, update, fused = _beside_eager(coupled.ClippedLamb, without=2)
    assert all(fused[1:]), update.reason
    assert difference <= 1e-6


@pytest.mark.parametrize(
    ("cls", "groups", "without", "match"),
    [
        (coupled.MeanNorm, 1, None, "depends on how many parameters"),
        (coupled.OneAfterAnother, 1, None, "updates of two parameters .* differ"),
        (coupled.Neighbours, 1, None, "reads elements of two"),
        (coupled.FirstGroupsRate, 2, None, "reads numbers of another"),
        (coupled.NormOfWeights, 1, 2, "on a trial"),
        (coupled.SkipsAll, 1, None, "branch of one parameter .* changes the update of another"),
        (coupled.CapsEach, 1, None, "reads elements of two"),
    ],
)
def test_other_couplings_run_as_eager_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, cls: Any, groups: int, without: int | None, match: str
) -> None:
    monkeypatch.setattr(update_module, "_warned", set())
    with pytest.warns(UserWarning, match=f"{cls.__name__} runs as eager.*({match})"):
        difference, _, fused = _beside_eager(cls, groups, without=without)
    assert not any(fused)
    assert difference == 0.0


def test_source_and_traces_do_not_grow_with_parameters() -> None:
    found = []
    for count in (2, 40):
        params = parameters(((3, 4), (5,)) * count)
        update = OptimizerUpdate(coupled.ClippedLamb(params))
        for step in range(2):
            set_grads(step, params)
            update.run()
        (prepared,) = update.prepared.values()
        found.append((prepared.source, update.classes.num_traces))
    assert found[0] == found[1]


def test_new_learning_rate_needs_no_new_trace() -> None:
    params = parameters()
    update = OptimizerUpdate(coupled.ClippedLamb(params))
    for step in range(6):
        set_grads(step, params)
        update.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        update.run()
    # one trace met no state, one found the coupling, two were of all classes together
    assert (update.classes.num_traces, update.num_prepared) == (1 + 1 + 2, 2)


def test_tied_parameters_are_written_after_all_totals() -> None:
    lists = []
    for _ in range(2):
        params = parameters(((6, 4), (24,)))
        params[1].data = params[0].data.view(24)
        lists.append(params)
    eager, update = coupled.GlobalNorm(lists[0]), OptimizerUpdate(coupled.GlobalNorm(lists[1]))
    for step in range(3):
        set_grads(step, *lists)
        eager.step()
        assert update.run().fused
    assert relative_difference(*lists) <= 1e-6


def test_clipping_before_a_coupled_update_is_part_of_its_totals() -> None:
    lists = [parameters(), parameters()]
    eager, update = coupled.GlobalNorm(lists[0]), OptimizerUpdate(coupled.GlobalNorm(lists[1]))
    for step in range(3):
        set_grads(step, *lists)
        torch.nn.utils.clip_grad_norm_(lists[0], 0.5)
        eager.step()
        assert update.run(plan=GradPlan(clips=(ClipNorm(0.5),))).fused
    assert relative_difference(*lists) <= 1e-6


def test_totals_do_not_depend_on_the_number_of_threads() -> None:
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        params = parameters(((300, 200), (7,), (90, 90)))
        update = OptimizerUpdate(coupled.ClippedLamb(params))
        for step in range(3):
            set_grads(step, params)
            update.run()
        found.append(params)
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _term(owner: int) -> Apply:
    element = load(f"{owner}:grad", "f64")
    square = apply("mul", element, element, dtype="f64")
    return apply("sqrt", reduce("sum", square, "f64"), dtype="f64")  # type: ignore[return-value]


def test_sum_of_equal_terms_is_a_total() -> None:
    totals: list[Total] = []
    start = constant(0.0, "f64")
    chain = apply("add", apply("add", start, _term(0), dtype="f64"), _term(1), dtype="f64")
    own = apply("mul", load("0:grad", "f64"), chain, dtype="f64")
    assert str(Couplings((0, 0), totals).resolve(own)) == "mul(0:grad[i], total.0)"
    assert totals == [Total("sum", ((0, localize(_term(0))),))]


def test_total_of_two_classes_has_a_term_of_each() -> None:
    totals: list[Total] = []
    other = apply("abs", _term(1), dtype="f64")
    chain = apply("max", _term(0), other, dtype="f64")
    assert str(Couplings((0, 1), totals).resolve(chain)) == "total.0"
    assert [number for number, _ in totals[0].terms] == [0, 1]
    assert totals[0].term(1) is localize(other)


@pytest.mark.parametrize("op", ["sub", "mul"])
def test_other_operations_do_not_make_totals(op: str) -> None:
    with pytest.raises(Coupled, match="couples parameters by"):
        Couplings((0, 0), []).resolve(apply(op, _term(0), _term(1), dtype="f64"))


def test_sum_of_unequal_terms_is_no_total() -> None:
    doubled = apply("mul", _term(1), scalar("group.lr", "f64"), dtype="f64")
    with pytest.raises(Coupled, match="couples parameters by add"):
        Couplings((0, 0), []).resolve(apply("add", _term(0), doubled, dtype="f64"))


def test_coupling_around_a_matrix_product_is_refused() -> None:
    class Whitened(coupled.GlobalNorm):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            params = self.param_groups[0]["params"]
            total = torch.stack([p.grad.norm() for p in params]).norm()
            for p in params:
                p.sub_(p.grad @ p.grad.T @ p.grad / total)

    params = parameters(((3, 3), (3, 3)))
    set_grads(0, params)
    update = OptimizerUpdate(Whitened(params))
    with pytest.warns(UserWarning, match="couples its parameters around whole-tensor"):
        assert not update.run().fused
    with pytest.raises(CodegenError, match="whole-tensor"):
        raise CodegenError(update.reason)
