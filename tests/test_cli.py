"""The commands: their tables and exit codes."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest
import torch

from mpcompile import doctor
from mpcompile.cli import main
from mpcompile.config import BUILT_PASSES, PASS_NAMES
from mpcompile.doctor import SUPPORTED_TORCH, Finding, diagnose, format_findings
from mpcompile.errors import CodegenError

ROOT = Path(__file__).resolve().parent.parent


def problems(findings: list[Finding]) -> dict[str, str]:
    return {item.check: item.problem for item in findings if item.problem}


def test_passes_lists_built_and_planned_passes_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(PASS_NAMES)
    assert [line.split()[0] for line in lines if "not yet" not in line] == list(BUILT_PASSES)


def test_passes_shows_what_the_environment_switches_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPCOMPILE_DISABLE", "fold-casts")
    assert main(["passes"]) == 0
    states = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert states["fold-casts"] == "off"
    assert states["insert-casts"] == "on"


def test_wrong_option_in_the_environment_ends_passes_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPCOMPILE_TABEL", "painted")
    assert main(["passes"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "did you mean 'MPCOMPILE_TABLE'?" in captured.err


@pytest.mark.parametrize("argv", [[], ["pases"], ["passes", "--all"]])
def test_wrong_command_line_ends_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_doctor_ends_with_0_if_all_is_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda trial: [Finding("torch", "2.13.0")])
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("mpcompile can work here.\n")


def test_doctor_ends_with_1_and_the_advice_if_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Finding("torch", "2.13.0"), Finding("C++ compiler", "none", "Install g++.")]
    monkeypatch.setattr(doctor, "diagnose", lambda trial: found)
    assert main(["doctor", "--no-trial"]) == 1
    assert "C++ compiler: Install g++.\n1 to repair." in capsys.readouterr().out


def test_diagnosis_looks_at_everything_without_a_trial() -> None:
    checks = [item.check for item in diagnose(trial=False)]
    assert checks[:7] == [
        "versions",
        "torch",
        "backend name",
        "environment",
        "C++ compiler",
        "cache folder",
        "CUDA",
    ]
    assert "bfloat16 on cpu" in checks


def test_bf16_kernels_of_the_cpu_are_run() -> None:
    finding = doctor._check_bf16("cpu")
    assert finding.problem is None
    assert "x the speed of float32" in finding.found


@pytest.mark.slow
def test_trial_step_compiles_and_agrees_with_eager() -> None:
    finding = doctor._try_step("cpu")
    assert finding.problem is None
    assert finding.found.startswith("loss ")
    assert " with 0 casts" not in finding.found


def test_failing_trial_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: str, backend: object) -> tuple[float, int]:
        raise RuntimeError("raised:\nno kernel\n\nmore")

    monkeypatch.setattr(doctor, "_train", fail)
    finding = doctor._try_step("cpu")
    assert finding.problem == "RuntimeError: raised: no kernel"


def test_wrong_loss_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([(1.0, 0), (float("nan"), 0)])
    monkeypatch.setattr(doctor, "_train", lambda device, backend: next(losses))
    assert "differ by more than 5 %" in str(doctor._try_step("cpu").problem)


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0", "1.13.1", "3.0.0"])
def test_unsupported_torch_is_a_problem(version: str) -> None:
    text = str(doctor._check_torch(version).problem)
    assert f"torch {version} is outside the range we know" in text
    assert "torch>=2.11,<2.15" in text


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1", torch.__version__])
def test_supported_torch_is_none(version: str) -> None:
    assert doctor._check_torch(version).problem is None


def test_supported_range_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (low, high) = (".".join(map(str, version)) for version in SUPPORTED_TORCH)
    assert f"torch>={low},<{high}" in project["dependencies"]


def test_missing_registration_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "entry_points", lambda group, name: ())
    assert "pip install -e ." in str(doctor._check_registration().problem)


def test_missing_cpp_compiler_is_a_problem() -> None:
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        finding = doctor._check_cpp_compiler()
    assert finding.found == "none"
    assert "Install g++ or clang++" in str(finding.problem)


def test_options_of_the_environment_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPCOMPILE_LOWERING", "eager")
    monkeypatch.setenv("MPCOMPILE", "0")
    finding = doctor._check_options()
    assert finding.problem is None
    assert "MPCOMPILE_LOWERING=eager" in finding.found
    assert "as stock Inductor" in finding.found


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("MPCOMPILE", "no", "is not a switch"),
        ("MPCOMPILE_DTYPE", "fp61", "is no dtype to train in"),
    ],
)
def test_wrong_options_of_the_environment_are_problems(
    name: str, value: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert match in str(doctor._check_options().problem)


def test_findings_are_a_table_with_the_problems_below() -> None:
    text = format_findings([Finding("a", "b"), Finding("c", "d", "e")])
    lines = text.splitlines()
    assert lines[0].split() == ["check", "found", "verdict"]
    assert [line.split() for line in lines[2:4]] == [["a", "b", "ok"], ["c", "d", "problem"]]
    assert lines[4:] == ["", "c: e", "1 to repair."]


def test_doctor_says_what_compiles_update_kernels_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "update kernels by NVRTC" in doctor._check_cuda().found

    def refuse() -> str:
        raise CodegenError("cuda.core is not installed")

    monkeypatch.setattr(doctor, "nvrtc_version", refuse)
    assert "by the optimizer itself (cuda.core is not installed)" in doctor._check_cuda().found
