"""Mistakes that a new user makes: each is refused, or warned of, with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from mpcompile.errors import CaptureError, ConfigError, MpcompileError
from tests.steps import batch, classifier_step, compile_step


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"disable": ["fold-cast"]}, r"'fold-cast'.*did you mean 'fold-casts'"),
        ({"enable": ["shadow-weights"]}, r"shadow-weights.* not yet"),
        ({"dtype": "bf17"}, r"'bf17' is no dtype to train in.*Use bfloat16 \(bf16\), float16"),
        ({"dtype": "int8"}, r"'int8' is no dtype to train in"),
        (
            {"grads": "drop", "capture": "regions", "disable": ["fuse-updates"]},
            r"grads='drop': in regions without fuse-updates",
        ),
        ({"loss_scale": "dynamic"}, r"only float16 needs a loss scale, dtype is bfloat16"),
        ({"table": "painted-cuda"}, r"Use painted, autocast-cuda or autocast-cpu"),
        ({"lowering": "egaer"}, r"did you mean 'eager'"),
        ({"max_recompiles": 0}, r"max_recompiles"),
        ({"keep_fp32": ["aten.mm"], "keep_half": ["aten.mm"]}, r"both name aten.mm"),
    ],
)
def test_wrong_option_is_refused_with_the_right_one(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        torch.compile(classifier_step()[1], backend="mpcompile", options=options)
    with pytest.raises(ConfigError, match=match):
        mpcompile.explain(classifier_step()[1], *batch(), options=options)


def test_all_mistakes_of_a_call_are_listed() -> None:
    options: dict[str, Any] = {"dtype": "fp17", "disable": "x", "tabel": "painted"}
    with pytest.raises(ConfigError) as caught:
        torch.compile(classifier_step()[1], backend="mpcompile", options=options)
    text = str(caught.value)
    assert text.startswith("3 mistakes in the options of backend 'mpcompile':")
    assert "did you mean 'table'?" in text
    assert "The options are dtype, table, keep_fp32" in text


def test_mode_together_with_options_is_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="Either mode or options can be specified"):
        torch.compile(
            classifier_step()[1],
            backend="mpcompile",
            mode="reduce-overhead",
            options={"lowering": "eager"},
        )


def test_step_with_frozen_model_warns() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.warns(UserWarning, match=r"nothing is trained\. Check that parameters have"):
        compile_step(lambda x: model(x).square().mean())(torch.ones(2, 4))


def test_backward_without_anything_to_train_raises_as_in_eager() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)

    def step(x: Tensor) -> None:
        model(x).sum().backward()

    with pytest.raises(RuntimeError, match="does not require grad"):
        step(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="does not require grad"):
        compile_step(step)(torch.ones(2, 4))


@pytest.mark.parametrize("step", [lambda x: x, lambda x: None, lambda x: 3])
def test_function_that_computes_nothing_runs_and_warns(step: Any) -> None:
    x = torch.ones(2)
    compiled = compile_step(step)
    with pytest.warns(UserWarning, match=r"compiled nothing, so all of it ran eagerly") as shown:
        assert compiled(x) is step(x)
    assert [warning.filename for warning in shown] == [__file__]
    compiled(x)


def test_step_without_tensors_runs_and_warns() -> None:
    def step(words: list[str]) -> str:
        return " ".join(words)

    with pytest.warns(UserWarning, match="no tensor computation"):
        assert compile_step(step)(["a", "b"]) == "a b"


def test_loop_around_backward_warns_that_nothing_was_compiled() -> None:
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> None:
        for row in x.split(2):
            model(row).square().mean().backward()

    compiled = compile_step(step, capture="regions")
    with pytest.warns(UserWarning, match=r"give the body of a loop around backward\(\) its own"):
        compiled(torch.ones(4, 4))
    assert model.weight.grad is not None


def test_empty_report_says_what_to_do() -> None:
    compiled = compile_step(classifier_step()[1])
    assert "nothing was compiled yet. Call the step once" in str(mpcompile.last_report(compiled))


def test_tensors_without_elements_are_fine() -> None:
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).sum()
        loss.backward()
        return loss.detach()

    assert compile_step(step)(torch.ones(0, 4)).item() == 0


def test_report_of_a_plain_function_names_it() -> None:
    with pytest.raises(CaptureError, match=r"last_report: .*step is not what torch\.compile"):
        mpcompile.last_report(classifier_step()[1])


def test_report_of_the_uncompiled_method_names_it() -> None:
    with pytest.raises(CaptureError, match=r"Pass the compiled step itself"):
        mpcompile.last_report(nn.Linear(2, 2).forward)


def test_16_bit_model_warns_and_says_to_keep_it_in_fp32() -> None:
    model, _ = classifier_step()
    model.to(torch.float16)
    x, labels = batch()

    def step() -> None:
        F.cross_entropy(model(x.half()).float(), labels).backward()

    with pytest.warns(UserWarning, match=r"6 parameters are float16.*Keep the model in float32"):
        compile_step(step)()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_torchs_own_error() -> None:
    model, step = classifier_step()
    with pytest.raises((AssertionError, RuntimeError), match=r"(?i)cuda|nvidia"):
        compile_step(step)(*(part.cuda() for part in batch()))
    del model


@pytest.mark.parametrize("error", [ConfigError, CaptureError])
def test_one_except_catches_our_errors(error: type[Exception]) -> None:
    assert issubclass(error, MpcompileError)
