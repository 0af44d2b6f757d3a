"""Find out whether an op has a kernel for 16-bit inputs, by running it.

Fake tensors accept a bfloat16 FFT or Cholesky; the kernels do not. So the real op is run once on a
tiny input, and the answer kept for the process. A device that is absent cannot be asked: for it a
table is shipped, and the reason says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from mpcompile.graph import decisions, nodes

# Ops that CUDA's 16-bit kernels lack (torch 2.14.1, "not implemented for 'BFloat16'" in ATen/native
# /cuda). Asked only where no CUDA device is present.
_ABSENT_CUDA = frozenset(
    f"aten.{op}"
    for op in """_fft_r2c _fft_c2r _fft_c2c linalg_cholesky_ex linalg_inv_ex linalg_qr _linalg_svd
    _linalg_eigh linalg_eig _linalg_solve_ex linalg_lu_factor_ex _cdist_forward _cdist_backward
    _pdist_forward _pdist_backward geqrf ormqr triangular_solve linalg_solve_triangular
    linalg_lu_solve linalg_lstsq linalg_householder_product histc bincount""".split()
)
_PROBE_NUMEL = 1 << 22  # elements that a probe allocates without thinking twice


@dataclass(frozen=True)
class Support:
    """Whether a kernel takes 16-bit inputs, and how that is known."""

    ok: bool
    reason: str


_known: dict[tuple[object, ...], Support] = {}


def has_half_kernel(node: Node, dtype: torch.dtype) -> Support:
    """Whether the kernel behind ``node`` runs with fp32 inputs cast to ``dtype``.

    The answer is kept per op, dtype, device type and ranks of the inputs.
    """
    inputs = [cast(Tensor, nodes.value(arg)) for arg in nodes.input_nodes(node)]
    device = inputs[0].device if inputs else torch.device("cpu")
    key = (node.target, dtype, device.type, tuple(tensor.dim() for tensor in inputs))
    if key not in _known:
        _known[key] = _find_support(node, dtype, device)
    return _known[key]


def _find_support(node: Node, dtype: torch.dtype, device: torch.device) -> Support:
    if device.type == "cuda" and not torch.cuda.is_available():
        absent = nodes.op_name(node) in _ABSENT_CUDA
        return Support(not absent, "from the shipped table, as no CUDA device is here to be asked")
    if device.type not in ("cpu", "cuda"):
        return Support(True, f"not asked on {device.type}")
    forked = [device] if device.type == "cuda" else []
    with (
        unset_fake_temporarily(),
        _disable_current_modes(),
        torch.no_grad(),
        torch.random.fork_rng(forked),
    ):
        for sizes in (_tiny_sizes, _own_sizes, _unit_batch_sizes):
            if _run(node, torch.float32, sizes) is None:
                error = _run(node, dtype, sizes)
                return Support(error is None, error or "ran on a tiny input")
    return Support(False, "could not be tried on a small input")


def _run(node: Node, dtype: torch.dtype, sizes: Any) -> str | None:
    """Run the op on zeros; return None, or the first line of what it raised."""
    inputs = nodes.input_nodes(node)
    shapes = sizes(node, [cast(Tensor, nodes.value(arg)) for arg in inputs])
    if shapes is None:
        return "no such input"
    made = {
        arg: _zeros(cast(Tensor, nodes.value(arg)), shape, dtype)
        for arg, shape in zip(inputs, shapes, strict=True)
    }
    args, kwargs = pytree.tree_map_only(
        Node,
        lambda arg: made[arg] if arg in made else _hint(nodes.value(arg)),
        (node.args, node.kwargs),
    )
    try:
        cast(Any, node.target)(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None


def _zeros(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    kept = dtype if like.dtype is torch.float32 else like.dtype
    return torch.zeros(shape, dtype=kept, device=like.device)


def _hint(val: Any) -> Any:
    """A number for a symbolic one."""
    if isinstance(val, (torch.SymInt, torch.SymFloat)):
        hint = val.node.hint
        return hint if hint is not None else 1
    return val


# Kernels do not all check that sizes fit, so made-up sizes are for ops where any do.
_ANY_SQUARE = frozenset(
    f"aten.{op}"
    for op in "mm bmm addmm baddbmm addbmm mv addmv addr dot vdot linalg_vecdot".split()
)


def _tiny_sizes(node: Node, inputs: list[Tensor]) -> list[tuple[int, ...]] | None:
    """Two in every dimension, for elementwise ops and matrix products."""
    if not decisions.is_pointwise(node) and nodes.op_name(node) not in _ANY_SQUARE:
        return None
    return [(2,) * tensor.dim() for tensor in inputs]


def _own_sizes(node: Node, inputs: list[Tensor]) -> list[tuple[int, ...]] | None:
    """The traced sizes, as numbers, if they are small."""
    sizes = _hinted(inputs)
    return sizes if _numel(sizes) <= _PROBE_NUMEL else None


def _unit_batch_sizes(node: Node, inputs: list[Tensor]) -> list[tuple[int, ...]] | None:
    """The traced sizes with the batch cut to one, if no other dimension has the batch's size."""
    sizes = _hinted(inputs)
    batch = sizes[0][0] if sizes and sizes[0] else 0
    if any(batch in size[1:] or size == (batch,) for size in sizes):
        return None
    return [(1, *size[1:]) if size and size[0] == batch else size for size in sizes]


def _hinted(inputs: list[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(int(_hint(size)) for size in tensor.shape) for tensor in inputs]


def _numel(sizes: list[tuple[int, ...]]) -> int:
    return sum(torch.Size(size).numel() for size in sizes)
