from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcompile.backend import last_report
from mpcompile.capture import dynamo_api
from tests.capture.remedies.whole_steps import Program, check_breaks, check_whole, train_with
from tests.steps import compile_step

LAYERS = [nn.LSTM, nn.GRU, nn.RNN]
FORMS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"bias": False},
]


def recurrent_program(layer: Callable[..., nn.Module], **options: Any) -> Program:
    """Return a step that reads the output and the last state of a layer."""
    read_in, cells = nn.Linear(4, 6), layer(6, 8, **options)

    def loss_of(x: Tensor) -> Any:
        output, states = cells(read_in(x))
        last = states[0] if isinstance(states, tuple) else states
        return output.square().mean() + last.sum()

    return train_with(loss_of, nn.ModuleList([read_in, cells]))


def parameters(model: nn.Module) -> Tensor:
    """Return all parameters in one vector."""
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize("options", FORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_recurrent_layer_is_in_the_graph(layer: Any, options: dict[str, Any]) -> None:
    # Which kernel multiplies by a weight depends on more than the op can pass on.
    program = lambda: recurrent_program(layer, **options)  # noqa: E731
    check_whole(program, torch.randn(3, 5, 4), tolerance=1e-5)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projected_lstm_is_in_the_graph() -> None:
    check_whole(lambda: recurrent_program(nn.LSTM, proj_size=3), torch.randn(3, 5, 4))


def test_one_sequence_without_a_batch_is_in_the_graph() -> None:
    check_whole(lambda: recurrent_program(nn.GRU), torch.randn(5, 4))


def test_layer_that_reads_the_batch_itself_is_in_the_graph() -> None:
    def build() -> Program:
        cells = nn.LSTM(4, 8)

        def loss_of(x: Tensor, start: Tensor) -> Any:
            output, (_, last) = cells(x, (start, start))
            return output.square().mean() + last.mean()

        return train_with(loss_of, cells)

    check_whole(build, torch.randn(3, 5, 4), torch.randn(1, 5, 8))


def test_number_of_time_steps_may_change() -> None:
    model, step = recurrent_program(nn.LSTM)
    copy, plain = recurrent_program(nn.LSTM)
    copy.load_state_dict(model.state_dict())
    compiled = compile_step(plain, dtype="float32", disable=["fuse-updates"])
    for length in (5, 7, 9, 11):
        x = torch.randn(length, 2, 4)
        assert torch.equal(compiled(x), step(x))
    assert last_report(compiled).breaks == []
    assert len(last_report(compiled).regions) == 2


def test_recurrent_layer_is_in_a_region_too() -> None:
    _, step = recurrent_program(nn.LSTM)
    compiled = compile_step(step, dtype="float32", capture="regions")
    compiled(torch.randn(3, 5, 4))
    assert "mpcompile.recurrent" in last_report(compiled).regions[0].aten_before


@pytest.mark.slow
def test_recurrent_layer_compiles_with_inductor() -> None:
    model, step = recurrent_program(nn.LSTM)
    copy, plain = recurrent_program(nn.LSTM)
    copy.load_state_dict(model.state_dict())
    compiled = compile_step(plain, dtype="float32", lowering="inductor")
    x = torch.randn(40, 5, 4)
    torch.testing.assert_close(compiled(x), step(x))
    torch.testing.assert_close(copy.state_dict(), model.state_dict())


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_recurrent_layer_computes_in_16_bits_forward_and_backward(layer: Any, dtype: str) -> None:
    model, step = recurrent_program(layer)
    copy, plain = recurrent_program(layer)
    copy.load_state_dict(model.state_dict())
    before = parameters(model)
    compiled = compile_step(plain, dtype=dtype, **({"loss_scale": 256} if dtype[0] == "f" else {}))
    x = torch.randn(12, 5, 4)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), step(x), rtol=0.02, atol=0.02)
    (region,) = last_report(compiled).regions
    lines = [line for line in region.aten_after.splitlines() if "= mpcompile.recurrent" in line]
    assert len(lines) == 2
    assert all("bf16" in line or "f16" in line for line in lines)
    moved = (parameters(model) - before).norm()
    assert (parameters(copy) - parameters(model)).norm() < 0.05 * moved


def test_recurrent_layer_stays_in_float32_if_the_user_says_so() -> None:
    _, step = recurrent_program(nn.LSTM)
    compiled = compile_step(step, keep_fp32=["mpcompile.recurrent"])
    compiled(torch.randn(3, 5, 4))
    (region,) = last_report(compiled).regions
    lines = [line for line in region.aten_after.splitlines() if "= mpcompile.recurrent" in line]
    assert len(lines) == 2
    assert not any("bf16" in line for line in lines)


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "batch_first": True}])
@pytest.mark.parametrize("layer", LAYERS)
def test_dropout_between_layers_is_in_the_graph(layer: Any, options: dict[str, Any]) -> None:
    program = lambda: recurrent_program(layer, num_layers=3, dropout=0.5, **options)  # noqa: E731
    check_whole(program, torch.randn(3, 5, 4), tolerance=1e-5)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projected_lstm_with_dropout_is_in_the_graph() -> None:
    program = lambda: recurrent_program(  # noqa: E731
        nn.LSTM, num_layers=2, dropout=0.5, proj_size=3, bias=False
    )
    check_whole(program, torch.randn(3, 5, 4), tolerance=1e-5)


@pytest.mark.filterwarnings("ignore:mpcompile. the first call compiled no backward")
def test_recurrent_layer_breaks_the_graph_without_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_patcher = dynamo_api.tracing_patcher

    def without_recurrent(*args: Any) -> Any:
        make_patcher(*args)
        return lambda: torch._dynamo.config._make_closure_patcher(trace_autograd_ops=True)()

    monkeypatch.setattr(dynamo_api, "tracing_patcher", without_recurrent)
    check_breaks(lambda: recurrent_program(nn.LSTM), torch.randn(3, 5, 4), reason="LSTM")
