"""The precision tables: well formed, sourced, and what torch.autocast really does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

import mpcompile.runtime.recurrent  # noqa: F401  # registers its ops
from mpcompile.graph import decisions, nodes
from mpcompile.passes import AssignPrecision
from mpcompile.precision import (
    AUTOCAST_CPU,
    AUTOCAST_CUDA,
    PAINTED,
    TABLES,
    Entry,
    Precision,
    Rule,
    Table,
)
from tests.checking import f32, trace_graphs

ALL = pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)

# Named in a table, and missing in some torch of the supported range (2.11 to 2.14).
VERSION_DEPENDENT: frozenset[str] = frozenset()


def test_tables_are_found_by_the_name_of_the_option() -> None:
    assert list(TABLES) == ["painted", "autocast-cuda", "autocast-cpu"]
    assert all(TABLES[table.name] is table for table in (PAINTED, AUTOCAST_CUDA, AUTOCAST_CPU))


@ALL
def test_every_entry_names_an_op_of_aten_or_ours(table: Table) -> None:
    missing = set()
    for op in table.entries:
        namespace, name = op.split(".")
        assert namespace in ("aten", "mpcompile")
        missing |= set() if hasattr(getattr(torch.ops, namespace), name) else {op}
    assert missing <= VERSION_DEPENDENT


@ALL
def test_every_composite_names_a_function_or_method_of_torch(table: Table) -> None:
    homes = (F, torch, Tensor)
    assert [
        name
        for name in table.composites
        if not any(hasattr(home, name.partition("-")[0]) for home in homes)
    ] == []


@ALL
def test_every_entry_has_a_source(table: Table) -> None:
    entries = [*table.entries.values(), *table.composites.values(), table.unlisted]
    starts = ("autocast CUDA: ", "autocast CPU: ", "painted: ")
    own = {"data movement", "random stream is kept as traced"}
    bare = [
        entry
        for entry in entries
        if not entry.source.startswith(starts)
        and entry.source not in own
        and entry.rule is not Rule.MIXED
    ]
    assert bare == []
    assert all(entry.source for entry in entries)


@ALL
def test_unlisted_op_gets_the_entry_of_the_table(table: Table) -> None:
    assert table.entry("aten.no_such_op") is table.unlisted


def test_what_painted_does_not_know_stays_fp32_and_autocast_lets_through() -> None:
    assert PAINTED.unlisted.rule is Rule.FP32
    assert AUTOCAST_CUDA.unlisted.rule is Rule.PROMOTE
    assert AUTOCAST_CPU.unlisted.rule is Rule.PROMOTE


def test_autocast_tables_do_not_rule_backward_and_know_no_weak_parameters() -> None:
    assert [table.ruled_backward for table in TABLES.values()] == [True, False, False]
    assert [table.weak_parameters for table in TABLES.values()] == [True, False, False]


@pytest.mark.parametrize(
    "op",
    """mean sum var var_mean std cumsum _softmax _log_softmax native_layer_norm native_group_norm
    exp log pow rsqrt reciprocal logsumexp mse_loss nll_loss_forward embedding_dense_backward
    scatter_add index_add linalg_vector_norm""".split(),
)
def test_painted_keeps_reductions_norms_losses_and_exponentials_fp32(op: str) -> None:
    assert PAINTED.entry(f"aten.{op}").rule is Rule.FP32


@pytest.mark.parametrize("op", "mm addmm bmm baddbmm convolution convolution_backward".split())
@ALL
def test_matrix_products_are_16_bit_in_every_table(table: Table, op: str) -> None:
    # Autocast's backward products follow from the dtype of the gradients.
    expected = {Rule.HALF} if table.ruled_backward else {Rule.HALF, table.unlisted.rule}
    assert table.entry(f"aten.{op}").rule in expected


def test_painted_follows_autocast_cuda_where_that_names_an_op() -> None:
    """All but the promoting ops, three of which it refines: see the table."""
    differ = {
        op
        for op, entry in AUTOCAST_CUDA.entries.items()
        if PAINTED.entries.get(op, PAINTED.unlisted).rule is not entry.rule
    }
    own = {"addcmul", "index_put", "scatter_add", "atan2", "_prelu_kernel"}
    assert differ == {f"aten.{op}" for op in own}


def test_precision_says_what_is_cast_and_what_is_stored() -> None:
    reads = {item: (item.computes_half, item.stores_half) for item in Precision}
    assert reads == {
        Precision.FP32: (False, False),
        Precision.HALF: (True, True),
        Precision.FP32_HALF: (False, True),
    }


def test_entries_are_plain_values() -> None:
    assert Entry(Rule.HALF, "why") == Entry(Rule.HALF, "why")


# What autocast does to ops on h (a 16-bit matrix), i (a 16-bit image), f and g (fp32 likewise).
Op = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
SAMPLE: dict[str, Op] = {
    "mm": lambda h, i, f, g: f @ f.t(),
    "linear": lambda h, i, f, g: F.linear(f, f),
    "addmm": lambda h, i, f, g: torch.addmm(f[:, :4], f, f.t()),
    "bmm": lambda h, i, f, g: torch.bmm(f[None], f.t()[None]),
    "baddbmm": lambda h, i, f, g: torch.baddbmm(f[None, :, :4], f[None], f.t()[None]),
    "mv": lambda h, i, f, g: torch.mv(f, f[0]),
    "einsum": lambda h, i, f, g: torch.einsum("ij,kj->ik", f, f),
    "conv1d": lambda h, i, f, g: F.conv1d(g[0], g[0, :, :, :3].contiguous()),
    "conv2d": lambda h, i, f, g: F.conv2d(g, g[:, :, :3, :3]),
    "conv3d": lambda h, i, f, g: F.conv3d(g[None], g[None, :, :2, :2, :2].contiguous()),
    "conv_transpose2d": lambda h, i, f, g: F.conv_transpose2d(g, g[:1].expand(3, 3, 8, 8)),
    "prelu": lambda h, i, f, g: F.prelu(h, f[0, :1]),
    "exp": lambda h, i, f, g: h.exp(),
    "expm1": lambda h, i, f, g: h.expm1(),
    "log": lambda h, i, f, g: h.log(),
    "log1p": lambda h, i, f, g: h.log1p(),
    "pow": lambda h, i, f, g: h.pow(2),
    "rsqrt": lambda h, i, f, g: h.rsqrt(),
    "reciprocal": lambda h, i, f, g: h.reciprocal(),
    "softplus": lambda h, i, f, g: F.softplus(h),
    "sinh": lambda h, i, f, g: h.sinh(),
    "tan": lambda h, i, f, g: h.tan(),
    "acos": lambda h, i, f, g: h.acos(),
    "layer_norm": lambda h, i, f, g: F.layer_norm(h, (6,)),
    "rms_norm": lambda h, i, f, g: F.rms_norm(h, (6,)),
    "group_norm": lambda h, i, f, g: F.group_norm(i, 3),
    "softmax": lambda h, i, f, g: h.softmax(-1),
    "log_softmax": lambda h, i, f, g: h.log_softmax(-1),
    "sum": lambda h, i, f, g: h.sum(-1),
    "prod": lambda h, i, f, g: h.prod(-1),
    "cumsum": lambda h, i, f, g: h.cumsum(-1),
    "cumprod": lambda h, i, f, g: h.cumprod(-1),
    "vector_norm": lambda h, i, f, g: torch.linalg.vector_norm(h, dim=-1),
    "logsumexp": lambda h, i, f, g: h.logsumexp(-1),
    "cdist": lambda h, i, f, g: torch.cdist(h, h),
    "mse_loss": lambda h, i, f, g: F.mse_loss(h, f, reduction="none"),
    "l1_loss": lambda h, i, f, g: F.l1_loss(h, f, reduction="none"),
    "smooth_l1_loss": lambda h, i, f, g: F.smooth_l1_loss(h, f, reduction="none"),
    "huber_loss": lambda h, i, f, g: F.huber_loss(h, f, reduction="none"),
    "cross_entropy": lambda h, i, f, g: F.cross_entropy(h, f.argmax(-1), reduction="none"),
    "nll_loss": lambda h, i, f, g: F.nll_loss(h, f.argmax(-1), reduction="none"),
    "bce_with_logits": lambda h, i, f, g: F.binary_cross_entropy_with_logits(
        h, f, reduction="none"
    ),
    "kl_div": lambda h, i, f, g: F.kl_div(h, f, reduction="none"),
    "cosine_similarity": lambda h, i, f, g: F.cosine_similarity(h, h * 2),
    "soft_margin_loss": lambda h, i, f, g: F.soft_margin_loss(h, f, reduction="none"),
    "avg_pool3d": lambda h, i, f, g: F.avg_pool3d(i[None], 2),
    "max_pool3d": lambda h, i, f, g: F.max_pool3d(i[None], 2),
    "adaptive_avg_pool3d": lambda h, i, f, g: F.adaptive_avg_pool3d(i[None], 2),
    "reflection_pad2d": lambda h, i, f, g: F.pad(i, (1, 1, 1, 1), mode="reflect"),
    "replication_pad2d": lambda h, i, f, g: F.pad(i, (1, 1, 1, 1), mode="replicate"),
    "mean": lambda h, i, f, g: h.mean(-1),
    "var": lambda h, i, f, g: h.var(-1),
    "relu": lambda h, i, f, g: h.relu(),
    "gelu": lambda h, i, f, g: F.gelu(h),
    "silu": lambda h, i, f, g: F.silu(h),
    "sigmoid": lambda h, i, f, g: h.sigmoid(),
    "tanh": lambda h, i, f, g: h.tanh(),
    "erf": lambda h, i, f, g: h.erf(),
    "elu": lambda h, i, f, g: F.elu(h),
    "leaky_relu": lambda h, i, f, g: F.leaky_relu(h),
    "sqrt": lambda h, i, f, g: h.sqrt(),
    "sin": lambda h, i, f, g: h.sin(),
    "add": lambda h, i, f, g: h + h.relu(),
    "add an fp32 value": lambda h, i, f, g: h + f,
    "mul by an fp32 value": lambda h, i, f, g: h * f,
    "mul by a number": lambda h, i, f, g: h * 2.0,
    "amax": lambda h, i, f, g: h.amax(-1),
    "transpose": lambda h, i, f, g: h.t(),
    "where": lambda h, i, f, g: torch.where(f > 0, h, h * 2),
    "masked_fill": lambda h, i, f, g: h.masked_fill(f > 0, 0.0),
    "max_pool2d": lambda h, i, f, g: F.max_pool2d(i, 2),
    "avg_pool2d": lambda h, i, f, g: F.avg_pool2d(i, 2),
    "adaptive_avg_pool2d": lambda h, i, f, g: F.adaptive_avg_pool2d(i, 2),
    "batch_norm": lambda h, i, f, g: F.batch_norm(i, None, None, training=True),
    "cat": lambda h, i, f, g: torch.cat([h, f]),
    "cat of 16-bit values": lambda h, i, f, g: torch.cat([h, h]),
    "stack": lambda h, i, f, g: torch.stack([h, f]),
    "addcmul": lambda h, i, f, g: torch.addcmul(h, h, f),
    "addcdiv": lambda h, i, f, g: torch.addcdiv(h, h, f),
    "atan2": lambda h, i, f, g: torch.atan2(h, f),
    "atan2 of 16-bit values": lambda h, i, f, g: torch.atan2(h, h),
    "grid_sample": lambda h, i, f, g: F.grid_sample(
        i, g[:, :2].permute(0, 2, 3, 1), align_corners=False
    ),
}

# Fake CUDA tensors cannot choose a kernel for these without a CUDA build of torch.
NEEDS_CUDA = frozenset(
    """addmm bmm baddbmm mv conv1d conv2d conv3d conv_transpose2d prelu avg_pool3d max_pool3d
    adaptive_avg_pool3d grid_sample""".split()
)

# Decomposed before the tables see them; what is left of them is no less precise than autocast, or
# moves values without rounding.
DECOMPOSED: dict[str, Op] = {
    "vecdot": lambda h, i, f, g: torch.linalg.vecdot(f, f),
    "bilinear": lambda h, i, f, g: F.interpolate(i, scale_factor=2.0, mode="bilinear"),
}


@contextmanager
def autocast_on_fake_cuda() -> Iterator[None]:
    """Autocast's CUDA rules without a device: torch.autocast would switch itself off."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_cache_enabled(True)


Matrices = tuple[Tensor, Tensor, Tensor, Tensor]


def matrices() -> Matrices:
    return f32(4, 6), f32(6, 6), f32(2, 3, 8, 8), f32(3, 3, 1, 1)


def eager_cpu() -> dict[str, bool]:
    """Whether each op of the sample gives 16 bits under autocast on CPU."""
    f, w, g, k = matrices()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h, i = f @ w, F.conv2d(g, k)
        found = {name: op(h, i, f, g).dtype for name, op in (SAMPLE | DECOMPOSED).items()}
    return {name: dtype is torch.bfloat16 for name, dtype in found.items()}


def eager_cuda() -> dict[str, bool]:
    """The same under autocast on CUDA, for what fake tensors can say."""
    with FakeTensorMode(), autocast_on_fake_cuda():
        f, w, g = (torch.empty(value.shape, device="cuda") for value in matrices()[:3])
        # A fake convolution would ask for a real backend.
        h, i = f @ w, torch.empty(2, 3, 8, 8, device="cuda", dtype=torch.bfloat16)
        found = {
            name: op(h, i, f, g).dtype for name, op in SAMPLE.items() if name not in NEEDS_CUDA
        }
    return {name: dtype is torch.bfloat16 for name, dtype in found.items()}


def assigned(table: str) -> dict[str, bool]:
    """Whether each op of the sample is to store 16 bits under ``table``."""
    sample = SAMPLE | DECOMPOSED

    def program(f: Tensor, w: Tensor, g: Tensor, k: Tensor) -> list[Tensor]:
        h, i = f @ w, F.conv2d(g, k)
        return [op(h, i, f, g) for op in sample.values()]

    with torch.no_grad():
        (traced,) = trace_graphs(program, *matrices(), table=table)
    traced.run(AssignPrecision())
    (results,) = traced.graph.output_node().args
    assert isinstance(results, (list, tuple))
    stored = []
    for node in results:
        assert isinstance(node, Node)
        decision = decisions.get(node)
        stored.append(decision.precision.stores_half if decision else nodes.is_half(node))
    return dict(zip(sample, stored, strict=True))


@pytest.fixture(scope="module")
def on_cpu() -> tuple[dict[str, bool], dict[str, bool]]:
    torch.manual_seed(0)
    return assigned("autocast-cpu"), eager_cpu()


@pytest.fixture(scope="module")
def on_cuda() -> tuple[dict[str, bool], dict[str, bool]]:
    torch.manual_seed(0)
    return assigned("autocast-cuda"), eager_cuda()


@pytest.mark.parametrize("name", SAMPLE)
def test_cpu_table_agrees_with_autocast(
    name: str, on_cpu: tuple[dict[str, bool], dict[str, bool]]
) -> None:
    ours, eager = on_cpu
    assert ours[name] == eager[name]


IN_FLOAT32_LATER = "rms_norm"
"""Autocast of torch 2.11 computes it in 16 bits on CUDA."""


@pytest.mark.parametrize("name", [name for name in SAMPLE if name not in NEEDS_CUDA])
def test_cuda_table_agrees_with_autocast(
    name: str, on_cuda: tuple[dict[str, bool], dict[str, bool]]
) -> None:
    ours, eager = on_cuda
    assert ours[name] == eager[name] or (name == IN_FLOAT32_LATER and not ours[name])


@pytest.mark.parametrize("name", DECOMPOSED)
def test_op_that_is_decomposed_before_the_table_is_more_precise_than_autocast(
    name: str, on_cpu: tuple[dict[str, bool], dict[str, bool]]
) -> None:
    ours, eager = on_cpu
    assert (ours[name], eager[name]) == (False, True)
