"""Graphs that another process compiled: the passes do not run, and the report is all there."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcompile.backend import last_report
from mpcompile.capture.region_cache import collect, find_entry, restore
from mpcompile.capture.regions import RegionRewriter
from mpcompile.inspection.report import RegionReport
from mpcompile.pass_base import PassContext, Stage
from tests.steps import batch, classifier_step, compile_step

# --- the entries ---------------------------------------------------------------------------------


def test_what_was_written_is_found_under_its_token(tmp_path: Path) -> None:
    entry = find_entry("a graph", tmp_path)
    assert entry is not None
    assert entry.findings is None
    entry.write({"kind": 1})
    found = find_entry("a graph", tmp_path)
    assert found is not None
    assert (found.token, found.findings) == (entry.token, {"kind": 1})
    assert found.path.parent.stat().st_mode & 0o077 == 0


def test_entry_that_is_missing_gets_a_token_that_nothing_was_kept_under(tmp_path: Path) -> None:
    tokens = {entry.token for _ in range(3) if (entry := find_entry("a graph", tmp_path))}
    assert len(tokens) == 3


@pytest.mark.parametrize("content", [b"", b"no archive", b"x\x9c+\xa8\x04\x00"])
def test_entry_that_is_broken_is_none(tmp_path: Path, content: bytes) -> None:
    entry = find_entry("a graph", tmp_path)
    assert entry is not None
    entry.write({"kind": 1})
    entry.path.write_bytes(content)
    found = find_entry("a graph", tmp_path)
    assert found is not None
    assert found.findings is None
    assert found.token != entry.token


def test_folder_of_others_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert find_entry("a graph", tmp_path / "link") is None


# --- what is kept --------------------------------------------------------------------------------


def facts(region: RegionReport) -> dict[str, Any]:
    """All that a report says of a region, except how long passes took."""
    found = {field.name: getattr(region, field.name) for field in dataclasses.fields(region)}
    del found["from_cache"]
    records = found.pop("pass_records")
    return {**found, "passes": [dataclasses.replace(item, time_us=0.0) for item in records]}


def test_all_that_passes_tell_the_report_is_kept() -> None:
    """A field that is new in the report and not kept would be missing behind a hit."""
    _, step = classifier_step()
    compiled = compile_step(step)
    compiled(*batch())
    region, config = last_report(compiled).regions[0], last_report(compiled).config
    found = pickle.loads(pickle.dumps(collect(region, PassContext(config, used_overrides={"x"}))))
    early = [record for record in region.pass_records if record.stage is Stage.DYNAMO]
    told = {name: getattr(region, name) for name in ("index", "grad_enabled", "dynamo_before")}
    fresh, ctx = RegionReport(**told, pass_records=early), PassContext(config)
    restore(found, fresh, ctx)
    assert facts(fresh) == facts(region)
    assert fresh.from_cache
    assert ctx.used_overrides == {"x"}
    defaults = RegionReport(**told)
    filled = [name for name, value in facts(region).items() if value != facts(defaults)[name]]
    assert {"kind", "aten_before", "casts", "decisions", "saved_bytes", "peak"} <= set(filled)


# --- through Inductor ----------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers, the second with a name that a test chooses."""

    def __init__(self, name: str = "second") -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.name = name
        self.add_module(name, nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.get_submodule(self.name)(torch.tanh(self.first(x)))
        return out


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of torch's and of ours; returns the folder of ours."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("MPCOMPILE_CACHE_DIR", str(tmp_path / "ours"))
    return tmp_path / "ours"


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of each region whose passes ran."""
    ran: list[int] = []
    rewrite = RegionRewriter.rewrite

    def counting(self: RegionRewriter, gm: torch.fx.GraphModule) -> None:
        ran.append(self._region.index)
        rewrite(self, gm)

    monkeypatch.setattr(RegionRewriter, "rewrite", counting)
    return ran


def train(name: str = "second", **options: object) -> tuple[list[float], Any]:
    """Run three steps of a fresh model, compiled as in a new process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(name)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 8)

    def step() -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    given: Any = {"check": "off", **options}
    compiled = torch.compile(step, backend="mpcompile", options=given)
    losses = [compiled().item() for _ in range(3)]
    return losses, last_report(compiled)


@pytest.mark.slow
@pytest.mark.parametrize(("capture", "kept"), [("whole", [True]), ("regions", [True, False])])
def test_second_compilation_runs_no_pass_and_reports_the_same(
    caches: Path, rewritten: list[int], capture: str, kept: list[bool]
) -> None:
    """Except on a graph that only detaches the loss: there is no code of it to keep."""
    losses, report = train(capture=capture)
    assert rewritten == list(range(len(kept)))
    rewritten.clear()
    again, second = train(capture=capture)
    assert again == losses
    assert rewritten == [index for index, is_kept in enumerate(kept) if not is_kept]
    assert [facts(region) for region in second.regions] == [facts(r) for r in report.regions]
    assert not any(region.from_cache for region in report.regions)
    assert [region.from_cache for region in second.regions] == kept
    assert "from the cache" in str(second)
    assert "from the cache" not in str(report)


@pytest.mark.slow
def test_passes_run_where_either_cache_has_lost_its_entry(
    caches: Path, rewritten: list[int]
) -> None:
    losses, _ = train()
    for path in (caches / "regions").iterdir():
        path.unlink()
    assert train()[0] == losses
    assert len(rewritten) == 2
    torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache.clear()
    assert train()[0] == losses
    assert len(rewritten) == 3
    assert train()[0] == losses
    assert len(rewritten) == 3


@pytest.mark.slow
def test_what_only_passes_read_is_part_of_the_key(caches: Path, rewritten: list[int]) -> None:
    """AOTAutograd's own key knows neither names of modules nor options of ours."""
    options: Any = {"keep_fp32": ["model.third"]}
    with pytest.warns(UserWarning, match="third"):
        _, plain = train(**options)
    _, kept = train("third", **options)
    assert len(rewritten) == 2
    products = [[d.precision for d in r.regions[0].decisions if d.op == "aten.addmm"]
                for r in (plain, kept)]  # fmt: skip
    assert products == [["half", "half"], ["half", "fp32"]]
    train("third", **options)  # the name of the option is known to be used, from the cache too
    assert len(rewritten) == 2


@pytest.mark.slow
def test_torchs_switch_switches_it_off(caches: Path, rewritten: list[int]) -> None:
    with torch._functorch.config.patch(enable_autograd_cache=False):
        train()
        train()
    assert len(rewritten) == 2
    assert not (caches / "regions").exists()


def follow_lengths() -> tuple[list[float], Any]:
    """Return losses and gradients over lengths that vary, and the report; as in a new process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8))

    def loss_of(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens).square().mean() * tokens.shape[1]
        return loss

    compiled = torch.compile(loss_of, backend="mpcompile")
    found = []
    for length in (5, 7, 9, 12):
        loss = compiled(torch.arange(2 * length).reshape(2, length) % 10)
        loss.backward()
        norms = [param.grad.norm().item() for param in model.parameters() if param.grad is not None]
        found += [loss.item(), *norms]
    with torch.no_grad():
        found.append(compiled(torch.arange(8).reshape(2, 4)).item())
    return found, last_report(compiled)


@pytest.mark.slow
def test_sizes_stay_symbols_and_evaluation_has_a_graph_of_its_own(
    caches: Path, rewritten: list[int]
) -> None:
    values, report = follow_lengths()
    num_regions = len(report.regions)
    again, second = follow_lengths()
    assert again == values
    assert rewritten == list(range(num_regions)) == [0, 1, 2]
    assert [facts(region) for region in second.regions] == [facts(r) for r in report.regions]
    assert all(region.from_cache for region in second.regions)
