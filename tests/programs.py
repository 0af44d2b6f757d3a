"""Training programs: a step with all that is around it, and how a compiled one is held to eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.steps import compile_step


def _nothing(call: int) -> None:
    pass


@dataclass
class Program:
    """A training program.

    Attributes:
        step: what is compiled.
        model: whose parameters, gradients and buffers are compared.
        optimizers: whose state and groups are compared.
        batch: from the number of a call to the arguments of the step.
        before: runs eagerly before each call.
        log: what the program notes in Python.
        extra: other tensors that the program changes.
        compiled: the step once it is compiled, for what ``before`` calls.
    """

    step: Callable[..., Any]
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer] = ()
    batch: Callable[[int], tuple[Any, ...]] = lambda call: ()
    before: Callable[[int], None] = _nothing
    log: list[Any] = field(default_factory=list)
    extra: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Raised:
    """What a step raised; equal if the type is."""

    name: str
    text: str = field(compare=False)

    def __repr__(self) -> str:
        return f"{self.name}: {self.text}"


Build = Callable[[], Program]


def run(program: Program, step: Callable[..., Any], calls: int) -> Iterator[dict[str, Any]]:
    """Yield what can be seen after each call."""
    for call in range(calls):
        torch.manual_seed(1000 + call)
        program.before(call)
        try:
            result: Any = step(*program.batch(call))
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            result = Raised(type(error).__name__, str(error))
        yield observe(program, result)


def observe(program: Program, result: Any) -> dict[str, Any]:
    """Return copies of everything that the program can see."""
    seen: dict[str, Any] = {"result": result, "log": list(program.log), "random": random_state()}
    for name, param in program.model.named_parameters(remove_duplicate=False):
        seen[name] = param
        seen[f"{name}.grad"] = param.grad
        seen[f"{name} is leaf, requires grad"] = (param.is_leaf, param.requires_grad)
    seen.update(program.model.named_buffers())
    for index, optimizer in enumerate(program.optimizers):
        seen[f"optimizer {index}"] = optimizer.state_dict()
    seen["extra"] = program.extra
    seen["shared gradients"] = shared_gradients(program.model)
    return {name: pytree.tree_map_only(Tensor, _copy, value) for name, value in seen.items()}


def random_state() -> Tensor:
    """Return the state of the global generator."""
    return torch.get_rng_state()


def shared_gradients(model: nn.Module) -> int:
    """Return how many gradients show the memory of another one."""
    grads = [p.grad for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
    return len(grads) - len({grad.untyped_storage().data_ptr() for grad in grads})


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def differences(eager: dict[str, Any], ours: dict[str, Any], tolerance: float) -> list[str]:
    """Return what differs, a line each; ``tolerance`` 0 asks for equal bits."""
    found = [f"{name} is there only once" for name in eager.keys() ^ ours.keys()]
    for name in eager.keys() & ours.keys():
        left, left_spec = pytree.tree_flatten(eager[name])
        right, right_spec = pytree.tree_flatten(ours[name])
        if left_spec != right_spec:
            found.append(f"{name}: {_short(eager[name])} != {_short(ours[name])}")
            continue
        pairs = zip(left, right, strict=True)
        found += [f"{name}: {text}" for a, b in pairs if (text := _differs(a, b, tolerance))]
    return sorted(found, key=lambda text: (not text.startswith("result"), text))


def _differs(eager: Any, ours: Any, tolerance: float) -> str:
    if not isinstance(eager, Tensor) or not isinstance(ours, Tensor):
        if isinstance(eager, float) and isinstance(ours, float):
            left, right = (torch.tensor(x, dtype=torch.float64) for x in (eager, ours))
            return _differs(left, right, tolerance)
        return "" if _same(eager, ours) else f"{_short(eager)} != {_short(ours)}"
    kinds = [(t.dtype, tuple(t.shape), t.layout, t.requires_grad) for t in (eager, ours)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} != {kinds[1]}"
    if eager.layout is torch.strided and _strides(eager) != _strides(ours):
        return f"strides {eager.stride()} != {ours.stride()}"
    a, b = (t.to_dense().double() for t in (eager, ours))
    equal = (a == b) | (a.isnan() & b.isnan())
    if bool(equal.all()):
        return ""
    size = float(a.abs().max())
    distance = float((a - b).abs().max())
    if distance <= tolerance * size:
        return ""
    return f"{distance / max(size, 1e-300):.1e} apart (largest value {size:.2e})"


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides that say where elements are: not those of length 1."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _same(eager: Any, ours: Any) -> bool:
    return type(eager) is type(ours) and bool(eager == ours)


def _short(value: Any) -> str:
    text = repr(value)
    size = 400 if isinstance(value, Raised) else 60
    return text if len(text) < size else f"{text[: size - 3]}..."


def compare(
    build: Build, calls: int = 4, tolerance: float = 0.0, **options: Any
) -> tuple[list[str], Any]:
    """Run the program that ``build`` makes eagerly and compiled.

    Returns:
        What differs, a line each, with the number of the call; and the compiled step.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of schedulers, hooks and torch.compile
        torch.manual_seed(0)
        eager = build()
        expected = list(run(eager, eager.step, calls))
        torch.manual_seed(0)
        ours = build()
        compiled = compile_step(ours.step, dtype="float32", **options)
        found = []
        for call, (a, b) in enumerate(zip(expected, run(ours, compiled, calls), strict=True)):
            found += [f"call {call}: {text}" for text in differences(a, b, tolerance)]
    return found, compiled


def sensitivity(build: Build, calls: int = 4, relative: float = 1e-7) -> list[str]:
    """Return, as ``compare`` does, what eager does otherwise from parameters that are rounded so.

    What is all rounding (the gradient of a weight in front of a batch norm, what Adam makes of it)
    differs as much as between eager and compiled.
    """
    runs = []
    for scale in (0.0, relative):
        torch.manual_seed(0)
        program = build()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in program.model.parameters():
                noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                param.mul_(1 + scale * noise.to(param.dtype))
        runs.append(list(run(program, program.step, calls)))
    pairs = enumerate(zip(*runs, strict=True))
    return [f"call {n}: {text}" for n, (a, b) in pairs for text in differences(a, b, 0.0)]
