"""Every entry of torch's own table of optimizers, five steps against eager."""

from __future__ import annotations

import copy
import importlib
import warnings
from typing import Any

import pytest

from mpcompile.runtime.update import OptimizerUpdate
from tests.runtime.updating import parameters, relative_difference, set_grads

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it would like hypothesis too
    optim_db = importlib.import_module("torch.testing._internal.common_optimizers").optim_db

EAGER = {"SparseAdam": "torch.sparse_coo", "LBFGS": ""}
"""Classes that run as eager, and the reason; LBFGS takes a closure and is never handed to us."""


def _entries() -> list[Any]:
    found = []
    for info in optim_db:
        for position, entry in enumerate(info.optim_inputs_func(device="cpu")):
            cls: Any = info.optim_cls
            name = f"{cls.__name__}-{position}-{entry.desc}"
            found.append(pytest.param(cls, entry.kwargs, id=name))
    return found


@pytest.mark.parametrize(("cls", "options"), _entries())
def test_five_steps_equal_eager(cls: Any, options: dict[str, Any]) -> None:
    if cls.__name__ == "LBFGS":
        pytest.skip("its step takes a closure, which runs the original")
    shapes = ((3, 4), (30, 7)) if cls.__name__ == "Muon" else ((3, 4), (7,), (5, 1, 3))
    eager_params, fused_params = parameters(shapes), parameters(shapes)
    eager = cls(eager_params, **copy.deepcopy(options))
    fused = cls(fused_params, **copy.deepcopy(options))
    update = OptimizerUpdate(fused)
    was_fused = []
    for step in range(5):
        set_grads(step, eager_params, fused_params)
        if cls.__name__ == "SparseAdam":
            for params in (eager_params, fused_params):
                for param in params:
                    param.grad = param.grad.to_sparse()  # type: ignore[union-attr]  # just set
        eager.step()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*runs as eager PyTorch.*sparse_coo")
            was_fused.append(update.run().fused)
    assert all(was_fused[1:]) == (cls.__name__ not in EAGER), update.reason
    assert EAGER.get(cls.__name__, "") in update.reason
    assert relative_difference(eager_params, fused_params) <= 1e-6
