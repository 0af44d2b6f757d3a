"""Through Inductor: nothing of ours on is stock bit for bit, and its cache knows our passes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from mpcompile.backend import last_report
from mpcompile.capture.backward_tags import _tagged_grad
from mpcompile.capture.graph_inputs import input_roles
from mpcompile.capture.regions import RegionRewriter
from mpcompile.capture.session import Session
from mpcompile.config import BUILT_PASSES, Config
from mpcompile.graph.roles import GraphKind, find_roles
from mpcompile.inspection.report import RegionReport
from mpcompile.lowering import Compiled, inductor
from mpcompile.pass_base import PassContext
from tests.steps import training_region

ALL_OFF: dict[str, Any] = {"disable": list(BUILT_PASSES)}


class Net(nn.Module):
    """Convolution, batch norm, dropout, norm, softmax: much of what has a decomposition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.batch = nn.BatchNorm2d(4)
        self.norm = nn.LayerNorm(64)
        self.query = nn.Linear(64, 64)
        self.out = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.batch(self.conv(x))).flatten(2)
        x = F.dropout(self.norm(x), 0.2)
        weights = F.softmax(self.query(x) @ x.transpose(1, 2) / 8, dim=-1)
        out: Tensor = self.out(F.gelu(weights @ x).mean(1))
        return out


def train(num_steps: int = 3, **compile_options: Any) -> tuple[list[float], list[Tensor], Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, labels = torch.randn(4, 3, 8, 8), torch.arange(4)

    def step() -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = torch.compile(step, **compile_options)
    losses = [compiled().item() for _ in range(num_steps)]
    return losses, [value.clone() for value in model.state_dict().values()], compiled


@pytest.fixture(scope="module")
def stock() -> tuple[list[float], list[Tensor]]:
    losses, state, _ = train(backend="inductor")
    return losses, state


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ALL_OFF,
        {"dtype": "float32", "disable": ["fuse-updates"]},
        {"disable": ["assign-precision", "fuse-updates"]},
    ],
    ids=["all off", "float32", "no precisions"],
)
def test_nothing_on_is_stock_inductor_bit_for_bit(
    options: dict[str, Any], stock: tuple[list[float], list[Tensor]]
) -> None:
    losses, state, _ = train(backend="mpcompile", options={**options, "capture": "regions"})
    assert losses == stock[0]
    torch.testing.assert_close(state, stock[1], rtol=0, atol=0)


@pytest.mark.slow
def test_kill_switch_is_stock_inductor_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, stock: tuple[list[float], list[Tensor]]
) -> None:
    monkeypatch.setenv("MPCOMPILE", "0")
    losses, state, compiled = train(backend="mpcompile")
    assert losses == stock[0]
    torch.testing.assert_close(state, stock[1], rtol=0, atol=0)
    assert last_report(compiled).regions == []


@pytest.mark.slow
def test_expansion_behind_the_passes_gives_inductors_own_numbers(
    monkeypatch: pytest.MonkeyPatch, stock: tuple[list[float], list[Tensor]]
) -> None:
    """Passes that are on but cast nothing, so that only the road of decompositions differs."""
    monkeypatch.setattr(RegionRewriter, "is_active", lambda self: True)
    options = {"dtype": "float32", "disable": ["fuse-updates"], "capture": "regions"}
    losses, state, _ = train(backend="mpcompile", options=options)
    assert losses == stock[0]
    torch.testing.assert_close(state, stock[1], rtol=0, atol=0)


@pytest.mark.slow
def test_bfloat16_follows_stock_fp32(stock: tuple[list[float], list[Tensor]]) -> None:
    losses, _, compiled = train(backend="mpcompile")
    assert losses == pytest.approx(stock[0], rel=3e-2)
    assert losses != stock[0]
    region = training_region(compiled)
    assert region.ops_after.half_share() == 1
    assert region.saved_bytes.keys() >= {"bf16"}


@pytest.mark.slow
def test_lengths_may_vary() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8))

    def loss_of(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens).square().mean()
        return loss

    compiled = torch.compile(loss_of, backend="mpcompile")
    for length in (5, 7, 9):
        tokens = torch.arange(2 * length).reshape(2, length) % 10
        found = compiled(tokens)
        found.backward()
        assert found.item() == pytest.approx(loss_of(tokens).item(), rel=1e-2)
    assert len(last_report(compiled).regions) == 2


# --- what reaches Inductor -----------------------------------------------------------------------


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keyword arguments of each call of ``compile_fx``, which is replaced by running as it is."""
    from torch._inductor import compile_fx

    calls: list[dict[str, Any]] = []

    def record(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Compiled:
        calls.append(kwargs)
        return gm.forward

    monkeypatch.setattr(compile_fx, "compile_fx", record)
    return calls


def call(**compile_options: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    with torch.no_grad():
        torch.compile(lambda x: x * weight, backend="mpcompile", **compile_options)(torch.ones(2))


@pytest.mark.parametrize(
    "compile_options", [{"options": {"mode": "reduce-overhead"}}, {"mode": "reduce-overhead"}]
)
def test_mode_reaches_inductors_config(
    compile_options: dict[str, Any], given: list[dict[str, Any]]
) -> None:
    call(**compile_options)
    assert given[0]["config_patches"]["triton.cudagraphs"] is True


def test_max_autotune_reaches_inductors_config(given: list[dict[str, Any]]) -> None:
    call(mode="max-autotune")
    assert given[0]["config_patches"]["max_autotune"] is True


def test_mode_reaches_stock_inductor_behind_the_kill_switch(
    monkeypatch: pytest.MonkeyPatch, given: list[dict[str, Any]]
) -> None:
    monkeypatch.setenv("MPCOMPILE", "0")
    call(mode="reduce-overhead")
    assert given[0].keys() == {"config_patches"}
    assert given[0]["config_patches"]["triton.cudagraphs"] is True


def test_default_mode_adds_our_pass_and_nothing_else(given: list[dict[str, Any]]) -> None:
    call()
    patches = given[0]["config_patches"]
    assert patches.keys() == {"joint_custom_pre_pass", "unsafe_marked_cacheable_functions"}
    (ours,) = patches["unsafe_marked_cacheable_functions"]
    assert ours == f"{_tagged_grad.__module__}.{_tagged_grad.__name__}"
    assert given[0]["decompositions"] == {}


def test_without_passes_inductor_takes_its_own_decompositions(given: list[dict[str, Any]]) -> None:
    call(options=ALL_OFF)
    assert given[0]["decompositions"] is None


# --- cache key -----------------------------------------------------------------------------------


def key(**options: object) -> str:
    session = Session(Config.from_options(options, environ={}))
    region = RegionReport(index=0, grad_enabled=True, dynamo_before="")
    rewriter = RegionRewriter(session, region, (), PassContext(session.config))
    uuid = inductor._build_joint_pass(rewriter).uuid()
    assert isinstance(uuid, str)
    return uuid


@pytest.mark.parametrize(
    "options",
    [
        {"disable": ["fold-casts"]},
        {"disable": ["cast-composites"]},
        {"dtype": "float32"},
        {"table": "autocast-cpu"},
        {"keep_fp32": ["aten.mm"]},
        {"keep_half": ["aten.exp"]},
        {"assignment": [{"region": 0, "node": "mm", "precision": "fp32"}]},
    ],
)
def test_cache_key_follows_toggles_and_options(options: dict[str, object]) -> None:
    assert key(**options) != key()
    assert key(**options) == key(**options)


def test_token_is_part_of_the_outer_key_alone() -> None:
    """The inner one is that of generated code, which does not depend on lines and names."""
    session = Session(Config())
    region = RegionReport(index=0, grad_enabled=True, dynamo_before="")
    rewriter = RegionRewriter(session, region, (), PassContext(session.config))
    inner, outer = (inductor._build_joint_pass(rewriter, token).uuid() for token in ("", "token"))
    assert inner == f"{rewriter.cache_key()};"
    assert outer == f"{inner}token"


def test_cache_key_follows_our_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpcompile.capture import regions

    before = key()
    monkeypatch.setattr(regions, "source_hash", lambda root: "edited")
    assert key() != before
    assert key().endswith(";edited;")


def test_kinds_are_found_behind_inductors_tracing_too() -> None:
    kinds: list[GraphKind] = []

    class Recorder:
        roles: Any = ()

        def rewrite(self, gm: GraphModule) -> None:
            kinds.append(find_roles(gm.graph, self.roles).kind)

        def observe(self, gm: GraphModule, is_backward: bool) -> None:
            pass

        def cache_key(self) -> str:
            return "recorder"

        def cache_token(self) -> str:
            return ""

        def functions(self) -> Sequence[str]:
            return ()

        def keeps_order(self) -> bool:
            return False

        def is_active(self) -> bool:
            return False

    recorder = Recorder()

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
        recorder.roles = input_roles(gm)
        return inductor.lower(gm, inputs, "default", recorder)

    weight = nn.Parameter(torch.ones(4))
    torch.compile(lambda x: (x * weight).sum(), backend=backend)(torch.ones(4)).backward()
    assert kinds == [GraphKind.TRAINING]


@pytest.mark.slow
def test_buckets_start_while_backward_goes_on() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())]
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.002)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        options: dict[str, Any] = {"check": "off", "check_sync": "off"}
        compiled = torch.compile(step, backend="mpcompile", options=options)
        _, (code, *_) = run_and_get_code(compiled, torch.randn(8, 32))
    finally:
        dist.destroy_process_group()
    called = re.findall(r"extern_kernels\.(mm)\(|mpcompile\.(\w+)_bucket\.default\('", code)
    order = " ".join(found or bucket for found, bucket in called)
    assert order == "mm mm send mm mm send mm send receive receive receive"
