"""Tensors that do not lie as the kernel wants them, and 16-bit and 64-bit ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from mpcompile.runtime.update import OptimizerUpdate
from tests.runtime.updating import parameters, relative_difference, set_grads


def _channels_last() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(weight), torch.nn.Parameter(torch.randn(6, 5).t())]


def _views() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    base = torch.randn(20, 30)
    return [torch.nn.Parameter(base[::2, 3:9]), torch.nn.Parameter(base[1::2, 1:4].t())]


def _zero_size() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s)) for s in ((0,), (3, 0, 2), (4,))]


def _zero_dim() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s)) for s in ((), (), (3,))]


def _shared_storage() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    base = torch.randn(40)
    return [
        torch.nn.Parameter(base[:20]),
        torch.nn.Parameter(base[10:30]),
        torch.nn.Parameter(base),
    ]


LAYOUTS: dict[str, Any] = {
    "channels-last": _channels_last,
    "views": _views,
    "zero-size": _zero_size,
    "zero-dim": _zero_dim,
    "shared-storage": _shared_storage,
}


@pytest.mark.parametrize("grads", ["as the parameter", "contiguous"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_updated_as_eager_does(name: str, grads: str) -> None:
    lists = [LAYOUTS[name](), LAYOUTS[name]()]
    pair = [torch.optim.AdamW(params, lr=0.01) for params in lists]
    update = OptimizerUpdate(pair[1])
    for step in range(5):
        set_grads(step, *lists)
        if grads == "contiguous":
            for params in lists:
                for param in params:
                    param.grad = param.grad.contiguous()
        pair[0].step()
        assert update.run().fused == (step > 0)
    assert relative_difference(*lists) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_other_dtypes_round_where_eager_rounds(name: str, dtype: torch.dtype) -> None:
    options = {"momentum": 0.9} if name == "SGD" else {}
    lists = [parameters(dtype=dtype), parameters(dtype=dtype)]
    pair = [getattr(torch.optim, name)(params, lr=0.01, **options) for params in lists]
    update = OptimizerUpdate(pair[1])
    for step in range(5):
        set_grads(step, *lists)
        pair[0].step()
        update.run()
    assert not update.reason
    bound = 1e-14 if dtype is torch.float64 else 4 * torch.finfo(dtype).eps
    assert relative_difference(*lists) <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_of_fp32_parameters(dtype: torch.dtype) -> None:
    lists = [parameters(), parameters()]
    pair = [torch.optim.AdamW(params, lr=0.01) for params in lists]
    update = OptimizerUpdate(pair[1])
    for step in range(5):
        set_grads(step, *lists)
        half = [param.grad.to(dtype) for param in lists[1]]  # type: ignore[union-attr]  # just set
        for param, grad in zip(lists[0], half, strict=True):
            param.grad = grad.float()
        pair[0].step()
        if step == 0:
            for param, grad in zip(lists[1], half, strict=True):
                param.grad = grad.float()
            update.run()
        else:
            assert update.run(half).fused, update.reason
    assert relative_difference(*lists) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_copy_is_the_rounded_parameter(dtype: torch.dtype) -> None:
    params = parameters()
    update = OptimizerUpdate(torch.optim.AdamW(params, lr=0.5))
    copies: dict[torch.Tensor, torch.Tensor] = {p: torch.zeros_like(p, dtype=dtype) for p in params}
    set_grads(0, params)
    update.run()
    update.set_copies(copies)
    for step in range(1, 4):
        set_grads(step, params)
        params[0].grad[0, 0] = torch.nan  # type: ignore[index]  # just set
        assert update.run().fused
        for param in params:
            assert torch.equal(
                copies[param].nan_to_num(7.0), param.detach().to(dtype).nan_to_num(7.0)
            )
    assert copies[params[0]][0, 0].isnan()


def test_params_bump_their_version() -> None:
    params = parameters()
    update = OptimizerUpdate(torch.optim.SGD(params, lr=0.1))
    for step in range(3):  # the first makes the table, the others find it
        set_grads(step, params)
        before = [p._version for p in params]
        update.run()
        assert all(p._version > v for p, v in zip(params, before, strict=True))


def test_thread_count_is_honoured_and_changes_nothing() -> None:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        params = parameters(((300, 500), (7,), (129, 257)))
        optimizer = torch.optim.AdamW(params)
        update = OptimizerUpdate(optimizer)
        for step in range(3):
            set_grads(step, params)
            update.run()
        results.append(copy.deepcopy(params))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
