"""Asking an AccumulateGrad node for its hooks changes nothing and finds what Python registered."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mpcompile.capture.node_hooks import has_node_hooks


def _node(param: torch.Tensor) -> Any:
    path: Any = param.view_as(param).grad_fn
    return path.next_functions[0][0]


def test_node_without_hooks_has_none_after_being_asked() -> None:
    param = nn.Parameter(torch.ones(3))
    node = _node(param)
    assert not has_node_hooks(param)
    assert not has_node_hooks(param)
    node(torch.ones(3))
    assert param.grad is not None
    assert torch.equal(param.grad, torch.ones(3))


def test_hooks_before_and_after_a_node_are_found_until_they_are_removed() -> None:
    param = nn.Parameter(torch.ones(3))
    node = _node(param)
    for name in ("register_hook", "register_prehook"):
        handle = getattr(node, name)(lambda *args: None)
        assert has_node_hooks(param), name
        handle.remove()
        assert not has_node_hooks(param), name


def test_asking_calls_no_hook_and_keeps_the_hooks() -> None:
    param = nn.Parameter(torch.ones(3))
    node, calls = _node(param), list[str]()
    node.register_hook(lambda *args: calls.append("called"))
    assert has_node_hooks(param)
    assert calls == []
    param.sum().backward()
    assert calls == ["called"]


def test_parameter_that_is_frozen_has_none() -> None:
    assert not has_node_hooks(nn.Parameter(torch.ones(3), requires_grad=False))


def test_asking_works_where_gradients_are_off() -> None:
    param = nn.Parameter(torch.ones(3))
    node = _node(param)
    node.register_hook(lambda *args: None)
    with torch.inference_mode():
        assert has_node_hooks(param)
