"""What a compiled step keeps: its own report, its recompile limit, its warnings."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpcompile.backend import last_report
from mpcompile.capture.session import MAX_WHOLE, current_session, explain_limit, session_of
from mpcompile.errors import CaptureError, ConfigError
from mpcompile.graph.roles import GraphKind
from tests.steps import batch, classifier_step, compile_step


class Trainer:
    def __init__(self) -> None:
        self.model, self._step = classifier_step()

    def step(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self._step(x, labels)
        return loss


def kinds(compiled: Any) -> list[GraphKind | None]:
    return [region.kind for region in last_report(compiled).regions]


# --- which step a graph belongs to ---------------------------------------------------------------


def test_compiled_function_has_a_report() -> None:
    _, step = classifier_step()
    compiled = compile_step(step)
    assert last_report(compiled).regions == []
    compiled(*batch())
    assert kinds(compiled)[0] is GraphKind.TRAINING
    assert [update.optimizer for update in last_report(compiled).updates] != []


def test_compiled_bound_method_has_a_report() -> None:
    compiled = compile_step(Trainer().step)
    compiled(*batch())
    assert kinds(compiled)[0] is GraphKind.TRAINING


def test_method_compiled_by_its_class_has_a_report() -> None:
    class Compiled(Trainer):
        step = compile_step(Trainer.step)

    trainer = Compiled()
    trainer.step(*batch())
    assert kinds(trainer.step)[0] is GraphKind.TRAINING


def test_compiled_module_has_a_report() -> None:
    model, _ = classifier_step()
    compiled = compile_step(model)
    x, labels = batch()
    F.cross_entropy(compiled(x), labels).backward()
    assert kinds(compiled) == [GraphKind.TRAINING]


def test_module_compiled_in_place_has_a_report() -> None:
    model, _ = classifier_step()
    model.compile(backend="mpcompile", options={"lowering": "eager"})
    x, labels = batch()
    F.cross_entropy(model(x), labels).backward()
    assert kinds(model) == [GraphKind.TRAINING]


def test_two_compiled_steps_have_separate_reports() -> None:
    one, other = (compile_step(classifier_step()[1]) for _ in range(2))
    one(*batch())
    num_regions = len(last_report(one).regions)
    assert last_report(other).regions == []
    other(*batch())
    assert len(last_report(one).regions) == num_regions > 0
    assert last_report(one) is not last_report(other)


def test_two_steps_of_one_function_keep_their_options() -> None:
    _, step = classifier_step()
    half, full = compile_step(step), compile_step(step, dtype="float32")
    half(*batch())
    full(*batch())
    assert last_report(half).regions[0].casts
    assert not any(region.casts for region in last_report(full).regions)


def test_step_compiled_twice_with_equal_options_has_two_reports() -> None:
    _, step = classifier_step()
    one, other = compile_step(step), compile_step(step)
    one(*batch())
    other(*batch())
    assert kinds(one) == kinds(other)
    assert kinds(one)[0] is GraphKind.TRAINING


def test_changed_environment_is_seen_by_a_second_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step = classifier_step()
    compile_step(step)(*batch())
    monkeypatch.setenv("MPCOMPILE_DTYPE", "float32")
    full = compile_step(step)
    full(*batch())
    assert last_report(full).regions[0].casts == []


def test_compiled_module_inside_a_compiled_step_belongs_to_the_step() -> None:
    model, _ = classifier_step()
    inner = compile_step(model)

    def step(x: Tensor, labels: Tensor) -> None:
        F.cross_entropy(inner(x), labels).backward()

    outer = compile_step(step)
    outer(*batch())
    assert kinds(outer) == [GraphKind.TRAINING]
    assert kinds(inner) == []


def test_second_call_adds_no_region() -> None:
    compiled = compile_step(classifier_step()[1])
    compiled(*batch())
    num_regions = len(last_report(compiled).regions)
    compiled(*batch())
    assert len(last_report(compiled).regions) == num_regions


def test_no_session_is_left_after_a_call_or_an_error() -> None:
    def fail(x: Tensor) -> Tensor:
        assert current_session() is not None
        raise ValueError("the user's own")

    compiled = compile_step(torch._dynamo.disable(fail))
    with pytest.raises(ValueError, match="the user's own"):
        compile_step(lambda x: fail(x))(torch.ones(2))
    assert current_session() is None
    del compiled


def test_steps_in_two_threads_have_separate_reports() -> None:
    compiled = [compile_step(classifier_step(seed)[1]) for seed in range(2)]
    losses: dict[int, list[float]] = {0: [], 1: []}
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(3):
                losses[index].append(compiled[index](*batch()).item())
        except BaseException as error:  # noqa: BLE001  (handed to the main thread)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    torch._dynamo.reset()
    for index in range(2):
        alone = compile_step(classifier_step(index)[1])
        assert losses[index] == [alone(*batch()).item() for _ in range(3)]
        assert kinds(compiled[index]).count(GraphKind.TRAINING) == 1


def test_session_goes_with_what_was_compiled() -> None:
    """Not with the graphs that Dynamo keeps at the code of the step: see ``whole_run_noter``."""
    _, step = classifier_step()
    compiled = compile_step(step)
    compiled(*batch())
    assert last_report(compiled).whole
    known: Any = session_of(compiled)
    session = weakref.ref(known)
    del compiled, known
    gc.collect()
    assert session() is None


def test_breaks_are_named_once_with_the_users_line() -> None:
    _, step = classifier_step()
    compiled = compile_step(step, capture="regions")
    compiled(*batch())
    found = [line for _, line in last_report(compiled).breaks if line.startswith("steps.py:")]
    backward = step.__code__.co_firstlineno + 2
    assert f"steps.py:{backward}" in found
    assert len(last_report(compiled).breaks) == len(set(last_report(compiled).breaks))


# --- recompiles ----------------------------------------------------------------------------------


def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


def call_with_factors(compiled: Any, number: int) -> None:
    """Strings are never made dynamic: each one is a graph of its own."""
    for index in range(number):
        compiled(torch.ones(2, requires_grad=True), {str(index): 1.0})


def looked_up(x: Tensor, table: dict[str, float]) -> Tensor:
    return sum((x * factor for factor in table.values()), start=x) * len(next(iter(table)))


def test_recompile_limit_is_that_of_the_options() -> None:
    compiled = compile_step(looked_up, max_recompiles=3)
    call_with_factors(compiled, 6)
    assert len(last_report(compiled).regions) == 3


def test_default_recompile_limit_is_above_that_of_dynamo() -> None:
    compiled = compile_step(looked_up)
    call_with_factors(compiled, 12)
    assert len(last_report(compiled).regions) == 12


def test_recompile_limit_of_others_is_left_alone() -> None:
    before = torch._dynamo.config.recompile_limit
    call_with_factors(compile_step(looked_up, max_recompiles=3), 2)
    assert torch._dynamo.config.recompile_limit == before


# --- errors --------------------------------------------------------------------------------------


def test_wrong_options_surface_at_torch_compile() -> None:
    with pytest.raises(ConfigError, match="2 mistakes in the options"):
        compile_step(scaled, dtyp="bf16", disable=["x"])


def test_wrong_mode_surfaces_at_torch_compile() -> None:
    with pytest.raises((ConfigError, RuntimeError), match="max-autotun"):
        torch.compile(scaled, backend="mpcompile", mode="max-autotun")


def test_wrong_environment_surfaces_at_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPCOMPILE_TABLE", "panted")
    with pytest.raises(ConfigError, match="did you mean 'painted'"):
        torch.compile(scaled, backend="mpcompile")


@pytest.mark.parametrize("step", [scaled, nn.Linear(2, 2), Trainer.step, 3, None])
def test_report_of_a_plain_step_is_refused(step: object) -> None:
    with pytest.raises(CaptureError, match=r"is not what torch.compile.* returned"):
        last_report(step)


def test_report_of_another_backends_step_is_refused() -> None:
    compiled = torch.compile(scaled, backend="aot_eager")
    with pytest.raises(CaptureError, match=r"last_report: scaled is not what"):
        last_report(compiled)


# --- our word on what torch.compile cannot do ----------------------------------------------------


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def test_double_backward_gets_our_explanation() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(x: Tensor) -> None:
        value = model(x).sum()
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        slope.square().sum().backward()

    with pytest.raises(RuntimeError, match="double backward") as caught:
        compile_step(step, capture="regions")(torch.ones(3, 4, requires_grad=True))
    assert "differentiates twice through a compiled graph" in notes(caught.value)
    assert "torch.compiler.disable" in notes(caught.value)


def test_second_backward_through_one_graph_gets_our_explanation() -> None:
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> None:
        fake = model(x).relu()
        fake.sum().backward()
        fake.square().sum().backward()

    with pytest.raises(RuntimeError) as caught:
        compile_step(step, capture="regions")(torch.ones(3, 4))
    assert "mpcompile: " in notes(caught.value)
    assert "torch.compile of any backend" in notes(caught.value)


def test_explanation_is_added_once() -> None:
    error = RuntimeError("Trying to backward through the graph a second time (or ...)")
    explain_limit(error)
    explain_limit(error)
    assert len(error.__notes__) == 1


def test_other_errors_get_no_explanation() -> None:
    error = RuntimeError("something else")
    explain_limit(error)
    assert not hasattr(error, "__notes__")


# --- warnings ------------------------------------------------------------------------------------


@pytest.fixture
def _no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_step_that_trains_nothing_warns_once() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    compiled = compile_step(lambda x: model(x).sum())
    with pytest.warns(UserWarning, match=r"compiled no backward.*requires_grad=True"):
        compiled(torch.ones(2, 4))
    compiled(torch.ones(2, 4))


def test_evaluation_without_grad_does_not_warn() -> None:
    model = nn.Linear(4, 4)

    @torch.no_grad()
    def evaluate(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out

    compile_step(evaluate)(torch.ones(2, 4))


def test_compiled_optimizer_step_alone_does_not_warn() -> None:
    model = nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    compile_step(lambda: opt.step())()


@pytest.mark.parametrize("option", ["keep_fp32", "keep_half"])
def test_override_that_names_nothing_warns(option: str) -> None:
    compiled = compile_step(classifier_step()[1], **{option: ["aten.convolution"]})
    with pytest.warns(UserWarning, match=r"aten.convolution in keep_fp32 or keep_half names noth"):
        compiled(*batch())


def test_override_that_names_something_does_not_warn() -> None:
    compiled = compile_step(classifier_step()[1], keep_fp32=["aten.addmm", "model.readout"])
    compiled(*batch())
    reasons = {d.reason for d in last_report(compiled).regions[0].decisions}
    assert "keep_fp32='model.readout'" in reasons


def test_16_bit_parameters_warn_and_train_as_written() -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)

    def step(x: Tensor) -> None:
        model(x).sum().backward()

    with pytest.warns(UserWarning, match=r"2 parameters are bfloat16 .*Keep the model in float32"):
        compile_step(step)(torch.ones(2, 4, dtype=torch.bfloat16))
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.bfloat16


# --- whole steps that are compiled anew ----------------------------------------------------------


def test_step_that_changes_each_time_becomes_regions() -> None:
    model, _ = classifier_step()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, int] = {}

    def step(x: Tensor, labels: Tensor, name: str) -> Tensor:
        names[name] = len(names)  # Dynamo guards on the keys
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = compile_step(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(MAX_WHOLE + 4):
            compiled(*batch(), str(index))
    report = last_report(compiled)
    assert len(report.whole) == MAX_WHOLE + 1
    assert any("compiled anew" in reason for reason, _ in report.breaks)
