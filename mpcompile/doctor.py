"""Find out whether this machine can train through mpcompile, and say what to do if not.

Each check returns findings; a finding with a problem makes the verdict. What can be asked by trying
is tried: kernels are run, and a small step is compiled and compared with eager.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn import functional

from mpcompile.codegen.nvrtc import nvrtc_version
from mpcompile.config import Config, environment_settings, is_disabled
from mpcompile.errors import CodegenError, ConfigError, MpcompileError

SUPPORTED_TORCH = ((2, 11), (2, 15))  # from, and below; as pyproject.toml has it
_MATMUL_SIZE = 1024
_MATMUL_RUNS = 5


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        check: What was looked at.
        found: What is there.
        problem: Why mpcompile cannot work so and what to do about it; None if it can.
    """

    check: str
    found: str
    problem: str | None = None


def diagnose(*, trial: bool = True) -> list[Finding]:
    """Run all checks; ``trial`` compiles a small step for each device, which takes seconds."""
    findings = [
        _check_python(),
        _check_torch(torch.__version__),
        _check_registration(),
        _check_options(),
        _check_cpp_compiler(),
        _check_cache(),
        _check_cuda(),
    ]
    for device in _devices():
        findings.append(_check_bf16(device))
        if trial:
            findings.append(_try_step(device))
    return findings


def format_findings(findings: list[Finding]) -> str:
    """Return the table of findings, then each problem, then the verdict."""
    rows = [(item.check, item.found, "problem" if item.problem else "ok") for item in findings]
    problems = [f"{item.check}: {item.problem}" for item in findings if item.problem]
    verdict = f"{len(problems)} to repair." if problems else "mpcompile can work here."
    return "\n".join(
        [tabulate(rows, headers=("check", "found", "verdict")), "", *problems, verdict]
    )


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _check_python() -> Finding:
    try:
        own = f"mpcompile {version('mpcompile')}"
    except PackageNotFoundError:
        own = "mpcompile from a checkout"
    return Finding("versions", f"{own}, Python {platform.python_version()}")


def _check_torch(found: str) -> Finding:
    lowest, too_high = SUPPORTED_TORCH
    major, minor = (int(part) for part in found.split(".")[:2])
    problem = None
    if not lowest <= (major, minor) < too_high:
        wanted = f"torch>={lowest[0]}.{lowest[1]},<{too_high[0]}.{too_high[1]}"
        problem = f"torch {found} is outside the range we know. pip install '{wanted}'."
    return Finding("torch", found, problem)


def _check_registration() -> Finding:
    found = entry_points(group="torch_dynamo_backends", name="mpcompile")
    if not found:
        advice = "Install the package: pip install -e . in a checkout."
        problem = f'torch.compile(step, backend="mpcompile") does not find the name. {advice}'
        return Finding("backend name", "not registered", problem)
    targets = sorted({item.value for item in found})
    return Finding("backend name", f"registered as {', '.join(targets)}")


def _check_options() -> Finding:
    settings = environment_settings()
    found = ", ".join(f"{name}={value}" for name, value in settings.items()) or "no MPCOMPILE*"
    try:
        Config.from_options(None)
        disabled = is_disabled()
    except ConfigError as error:
        return Finding("environment", found, str(error))
    note = "; so everything compiles as stock Inductor" if disabled else ""
    return Finding("environment", found + note)


def _check_cpp_compiler() -> Finding:
    # Private, seen in torch 2.11 to 2.14: the search that Inductor itself makes.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
        text = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    except (InvalidCxxCompiler, OSError, subprocess.CalledProcessError):
        advice = "Install g++ or clang++ (CXX names another), or use options={'lowering': 'eager'}."
        return Finding("C++ compiler", "none", f"Inductor generates C++ code. {advice}")
    return Finding("C++ compiler", text.stdout.splitlines()[0])


def _check_cache() -> Finding:
    # Private, seen in torch 2.11 to 2.14; it creates the folder, as any compilation would.
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        path = cache_dir()
    except OSError as error:
        return Finding(
            "cache folder", "none", f"{error}. Let TORCHINDUCTOR_CACHE_DIR name another."
        )
    if not os.access(path, os.W_OK):
        return Finding(
            "cache folder", path, "It is read-only. Use another TORCHINDUCTOR_CACHE_DIR."
        )
    return Finding("cache folder", path)


def _check_cuda() -> Finding:
    if not torch.cuda.is_available():
        built = (
            f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
        )
        return Finding("CUDA", f"no device ({built})")
    found = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    if importlib.util.find_spec("triton") is None:
        advice = "pip install triton, or use options={'lowering': 'eager'}."
        return Finding("CUDA", found, f"Inductor needs Triton for CUDA. {advice}")
    return Finding("CUDA", f"{found}, update kernels by {_update_kernels()}")


def _update_kernels() -> str:
    """Return what compiles update kernels for CUDA, or that the optimizer's own code runs."""
    try:
        return nvrtc_version()
    except CodegenError as error:
        return f"the optimizer itself ({error})"


def _check_bf16(device: str) -> Finding:
    """Run the kernels that mpcompile casts for, and time the most important one."""
    check = f"bfloat16 on {device}"
    image = torch.ones(1, 8, 8, 8, dtype=torch.bfloat16, device=device)
    probes: dict[str, Callable[[], Tensor]] = {
        "matmul": lambda: image[0, 0] @ image[0, 0],
        "convolution": lambda: functional.conv2d(image, image),
        "attention": lambda: functional.scaled_dot_product_attention(image, image, image),
    }
    for name, probe in probes.items():
        try:
            probe()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            advice = "Use options={'dtype': 'float32'} here."
            return Finding(check, f"no {name}", f"{name} does not run: {reason}. {advice}")
    ratio = _matmul_seconds(torch.float32, device) / _matmul_seconds(torch.bfloat16, device)
    return Finding(check, f"{', '.join(probes)}; matmul at {ratio:.1f}x the speed of float32")


def _matmul_seconds(dtype: torch.dtype, device: str) -> float:
    """Return the median time of one square matrix product."""
    matrix = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype, device=device)
    seconds = []
    for _ in range(_MATMUL_RUNS + 1):
        start = time.perf_counter()
        product = matrix @ matrix
        product[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _try_step(device: str) -> Finding:
    """Compile a small training step through the backend and compare its loss with eager's."""
    from mpcompile.backend import mpcompile

    check = f"training step on {device}"
    start = time.perf_counter()
    try:
        eager, _ = _train(device, None)
        compiled, num_casts = _train(device, mpcompile)
    except (MpcompileError, RuntimeError) as error:
        # torch's own messages go on after an empty line, with how to debug the compiler.
        reason = " ".join(str(error).strip().split("\n\n")[0].split())
        return Finding(check, "fails", f"{type(error).__name__}: {reason}")
    seconds = time.perf_counter() - start
    found = f"loss {compiled:.4f} with {num_casts} casts, eager {eager:.4f}, {seconds:.1f} s"
    if not abs(compiled - eager) < 0.05 * abs(eager):
        return Finding(check, found, "The losses differ by more than 5 %. Please report it.")
    return Finding(check, found)


def _train(device: str, backend: Callable[..., object] | None) -> tuple[float, int]:
    """Train a small model for three steps; return the loss and the number of casts compiled in."""
    from mpcompile.backend import last_report

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)
        ).to(device)
        inputs, targets = torch.randn(16, 32).to(device), (torch.arange(16) % 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    run = step if backend is None else torch.compile(step, backend=backend)
    for _ in range(3):
        loss = run(inputs, targets)
    reports = [] if backend is None or is_disabled() else [last_report(run)]
    return loss.item(), sum(len(region.casts) for report in reports for region in report.regions)
