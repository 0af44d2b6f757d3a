"""Hooks on AccumulateGrad nodes, and hooks that ``autograd.grad`` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capture.patterns.registry import network, pair, pattern
from tests.programs import Program


def _accumulator(param: Tensor) -> Any:
    node: Any = param.expand_as(param).grad_fn
    return node.next_functions[0][0]


def _with_node(kind: str, first: int, last: int | None = None) -> Callable[[], Program]:
    """Have the node of a weight hooked from call ``first`` to call ``last``."""

    def build() -> Program:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        kept: list[Any] = []  # a node that nobody holds is gone, and its hooks with it

        def step(x: Tensor, y: Tensor) -> Tensor:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            return loss.detach()

        program = Program(step, model, [opt], pair)

        def note(*args: Any) -> None:
            program.log.append("accumulated")

        def before(call: int) -> None:
            if call == first:
                node = _accumulator(model[0].weight)
                hook: Any = note if kind == "register_hook" else lambda grads: (grads[0] * 2,)
                kept.extend([node, getattr(node, kind)(hook)])
            if call == last:
                kept[1].remove()

        program.before = before
        return program

    return build


_NODES: dict[str, tuple[Any, ...]] = {
    "hook_of_a_node": ("register_hook", 0),
    "hook_of_a_node_added_later": ("register_hook", 2),
    "hook_before_a_node": ("register_prehook", 0),
    "hook_before_a_node_added_later": ("register_prehook", 2),
    "hook_before_a_node_added_later_and_removed": ("register_prehook", 1, 3),
}
for _name, _arguments in _NODES.items():
    pattern(_name, whole=False)(_with_node(*_arguments))


@pattern()
def hook_of_a_node_of_another_model() -> Program:
    model, other = network(), network(1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    nodes = [_accumulator(param) for param in other.parameters()]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    program = Program(step, model, [opt], pair)

    def before(call: int) -> None:
        nodes[0].register_hook(lambda *args: program.log.append("other"))
        other(pair(call)[0]).sum().backward()

    program.before = before
    return program


def _with_grad(kind: str, first: int) -> Callable[[], Program]:
    """Have a weight hooked whose gradient ``autograd.grad`` gives, from call ``first``."""

    def build() -> Program:
        model = network()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        params = list(model.parameters())

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(model(x), y)
            for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                param.grad = grad
            opt.step()
            return loss.detach()

        def before(call: int) -> None:
            if call == first:
                hook: Any = lambda grad: grad * 2  # noqa: E731  # register_hook is not typed
                getattr(params[0], kind)(hook)

        return Program(step, model, [opt], pair, before)

    return build


for _first, _when in ((0, ""), (2, "_added_later")):
    pattern(f"hook_of_a_parameter_that_grad_calls{_when}", whole=False)(
        _with_grad("register_hook", _first)
    )
    pattern(f"hook_after_accumulation_that_grad_does_not_call{_when}")(
        _with_grad("register_post_accumulate_grad_hook", _first)
    )
