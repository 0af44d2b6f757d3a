"""CUDA C++ spellings, and the frame that runs a kernel over chunks of all tensors together.

The text needs no header and depends on the cases only, never on how many tensors there are or how
large: a chunk starts at a 64-bit offset, and inside it indices have 32 bits. A phase is one launch.
Uniform values are computed by one thread of each block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpcompile.codegen.cuda_frame import BLOCK, FIELDS, PRELUDE, THREADS, resident_blocks
from mpcompile.codegen.emitter import Block, indent, with_sources
from mpcompile.codegen.expr import BYTES, Expr, Load, Reduce, Scalar, Store, postorder
from mpcompile.codegen.schedule import Kernel, Phase, Schedule, build_schedule

TOTAL = "total"
"""The scalar that holds the sum, or the maximum, over all rows."""

_CTYPES = {
    "f16": "uint16_t",
    "bf16": "uint16_t",
    "f32": "float",
    "f64": "double",
    "i64": "int64_t",
    "bool": "bool",
}
_SLOTS = {"f16": "bits", "bf16": "bits", "f32": "f32", "f64": "f64", "i64": "i64", "bool": "truth"}

_SPELLINGS = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "fma": "fma({0}, {1}, {2})",
    "div_by": "div_by({0}, {1}, {2})",
    "neg": "(-{0})",
    "abs": "abs({0})",
    "sqrt": "sqrt({0})",
    "pow": "pow({0}, {1})",
    "exp": "exp({0})",
    "log": "log({0})",
    "log2": "log2({0})",
    "sin": "sin({0})",
    "cos": "cos({0})",
    "tanh": "tanh({0})",
    "floor": "floor({0})",
    "ceil": "ceil({0})",
    "trunc": "trunc({0})",
    "round": "rint({0})",
    "sign": "sign_of({0})",
    "max": "max_nan({0}, {1})",
    "min": "min_nan({0}, {1})",
    "floordiv": "floor_div({0}, {1})",
    "mod": "floor_mod({0}, {1})",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
    "and": "({0} && {1})",
    "or": "({0} || {1})",
    "not": "(!{0})",
    "where": "({0} ? {1} : {2})",
}

OPS = frozenset(_SPELLINGS)
"""The operations that CUDA C++ spells; every target spells the same."""

_BITS = {
    "f32": ("float_of(0x{0:08x}u)", 0x7FC00000, 0x7F800000),
    "f64": ("double_of(0x{0:016x}ll)", 0x7FF8 << 48, 0x7FF0 << 48),
}


class Cuda:
    """The spellings of CUDA C++17, without headers."""

    def ctype(self, dtype: str) -> str:
        """Return the type of a value of ``dtype``; 16-bit floats travel as their bits."""
        return _CTYPES[dtype]

    def literal(self, value: float, dtype: str) -> str:
        """Return an exact literal."""
        if dtype == "bool":
            return "true" if value else "false"
        if dtype == "i64":
            return f"int64_t({int(value)})"
        if math.isnan(value) or math.isinf(value):
            form, nan, inf = _BITS[dtype]
            text = form.format(nan if math.isnan(value) else inf)
        else:
            text = f"{abs(float(value)).hex()}{'f' if dtype == 'f32' else ''}"
        return f"(-{text})" if math.copysign(1.0, value) < 0 else text

    def spelling(self, op: str, dtype: str, args: list[str]) -> str:
        """Return ``op`` applied to ``args``."""
        return _SPELLINGS[op].format(*args)

    def cast(self, source: str, dest: str, arg: str) -> str:
        """Return ``arg`` converted from ``source`` to ``dest``, through f32 for 16 bits."""
        if source in ("f16", "bf16"):
            widened = f"{source}_to_f32({arg})"
            return widened if dest == "f32" else self.cast("f32", dest, widened)
        if dest in ("f16", "bf16"):
            return f"f32_to_{dest}({self.cast(source, 'f32', arg)})"
        return arg if source == dest else f"{_CTYPES[dest]}({arg})"


@dataclass(frozen=True)
class Total:
    """What is done once with the first sum of all rows together.

    ``stores`` read the scalar ``total``; they write numbers of the launch, or ``norm``. Without any
    the sums of the chunks are all that is wanted.
    """

    stores: tuple[Store, ...]


@dataclass(frozen=True)
class _Frame:
    """Where the leaves of one case live; ``index`` maps leaf names to (array, position)."""

    kernel: Kernel
    schedule: Schedule
    index: dict[str, tuple[str, int]]

    def column(self, name: str, dtype: str) -> str:
        return f"(({_CTYPES[dtype]}*)ptr[{self.index[name][1]}])"

    def uniform_leaf(self, expr: Expr) -> str | None:
        """Spell a leaf of the uniform part, or a reduction of an earlier phase."""
        if isinstance(expr, Reduce):
            return f"sum[{self.schedule.sums[expr]}]"
        if not isinstance(expr, Scalar):
            return None
        if expr.name == TOTAL:
            return TOTAL
        array, position = self.index[expr.name]
        if array == "ptr":
            return f"*{self.column(expr.name, expr.dtype)}"
        return f"({_CTYPES[expr.dtype]}){array}[{position}]"


def _leaf_index(kernel: Kernel) -> dict[str, tuple[str, int]]:
    assert not kernel.shared, "numbers of a group reach a device as numbers of its rows"
    arrays = {"ptr": kernel.columns, "number": kernel.numbers, "input": kernel.inputs}
    return {name: (a, i) for a, names in arrays.items() for i, name in enumerate(names)}


def _by_one_thread(lines: list[str]) -> list[str]:
    return ["if (threadIdx.x == 0) {", *indent(lines), "}"] if lines else []


def _fold(reduction: Reduce) -> str:
    return {"sum": "Sum", "max": "Max"}[reduction.op]


def _uniform_part(frame: _Frame, phase: Phase) -> tuple[list[str], dict[Expr, str]]:
    """Return what computes the uniform values of a loop once a block, and their names."""
    if not phase.uniforms:
        return [], {}
    block = Block(Cuda(), frame.uniform_leaf, "u")
    texts = block.emit(phase.uniforms)
    lines, writes, names = [], [], {}
    for k, (expr, text) in enumerate(zip(phase.uniforms, texts, strict=True)):
        slot = f"s.uniform[{k}].{_SLOTS[expr.dtype]}"
        writes.append(f"{slot} = {text};")
        lines.append(f"const {_CTYPES[expr.dtype]} v{k} = {slot};")
        names[expr] = f"v{k}"
    return [*_by_one_thread(block.lines + writes), "__syncthreads();", *lines], names


def _buffers(roots: Sequence[Expr], stores: Sequence[Store]) -> dict[str, str]:
    """Return the dtype of each buffer that a loop touches."""
    found = {store.buffer: store.value.dtype for store in stores}
    found |= {expr.buffer: expr.dtype for expr in postorder(roots) if isinstance(expr, Load)}
    return dict(sorted(found.items()))


def _element_part(frame: _Frame, phase: Phase, uniform: dict[Expr, str]) -> list[str]:
    """Return the loop over the elements of a chunk."""
    roots = [r.operand for r in phase.reductions] + [store.value for store in phase.stores]
    at = {buffer: frame.index[buffer][1] for buffer in _buffers(roots, phase.stores)}
    block = Block(Cuda(), lambda e: f"in{at[e.buffer]}[j]" if isinstance(e, Load) else None)
    block.names.update(uniform)
    texts = block.emit(roots)
    count = len(phase.reductions)
    body = [*block.lines]
    for k, (r, text) in enumerate(zip(phase.reductions, texts, strict=False)):
        body.append(f"r{k} = {_fold(r)}::of(r{k}, double({text}));")
    for store, text in zip(phase.stores, texts[count:], strict=True):
        body.append(f"out{at[store.buffer]}[j] = {text};")
    dtypes = _buffers(roots, phase.stores)
    width = max(2, min(8, 16 // min(BYTES[dtype] for dtype in dtypes.values())))
    loaded = {e.buffer for e in postorder(roots) if isinstance(e, Load)} & _read(block.lines, at)
    lines = [
        "const int64_t begin = t.chunk_begin[chunk];",
        "const int count = int(t.chunk_end[chunk] - begin);",
    ]
    for buffer, dtype in dtypes.items():
        kind, k = _CTYPES[dtype], at[buffer]
        lines.append(f"{kind}* __restrict__ b{k} = ({kind}*)ptr[{k}] + begin;")
    lines += [f"double r{k} = 0;" for k in range(count)]
    loads, writes = [], []
    for buffer, dtype in dtypes.items():
        kind, k = _CTYPES[dtype], at[buffer]
        if buffer in loaded:
            loads += [f"alignas(16) {kind} in{k}[W];", f"load(in{k}, b{k} + i);"]
    for store in phase.stores:
        kind, k = _CTYPES[store.value.dtype], at[store.buffer]
        loads.append(f"alignas(16) {kind} out{k}[W];")
        writes.append(f"store(b{k} + i, out{k});")
    lines += _head(dtypes, at, width)
    return [
        *lines,
        "const auto element = [&](auto width, int i) {",
        "  constexpr int W = decltype(width)::value;",
        *indent(loads),
        "  #pragma unroll",
        "  for (int j = 0; j < W; j++) {",
        *indent(body, 2),
        "  }",
        *indent(writes),
        "};",
        f"each_element<{width}>(head, count, element);",
    ]


def _read(lines: Sequence[str], at: dict[str, int]) -> set[str]:
    """Return the buffers that ``lines`` read; one below a uniform value is not."""
    text = "\n".join(lines)
    return {buffer for buffer, k in at.items() if f"in{k}[j]" in text}


def _head(dtypes: dict[str, str], at: dict[str, int], width: int) -> list[str]:
    """Return what finds the first element that is aligned in every buffer, if there is one."""
    smallest = min(dtypes, key=lambda buffer: BYTES[dtypes[buffer]])
    checks = [f"is_aligned<{width}>(b{at[b]}, head)" for b in dtypes]
    return [
        f"int head = head_of<{width}>(b{at[smallest]});",
        f"if (!({' && '.join(checks)}) || head > count) head = count;",
    ]


def _finish_part(frame: _Frame, phase: Phase) -> list[str]:
    """Return what the block that arrives last does once for its tensor."""
    lines = ["const int64_t first = t.first_chunk[row], end = t.first_chunk[row + 1];"]
    lines.append("if (!arrives_last(t.arrivals + row, end - first, s)) return;")
    sums = []
    for k, r in enumerate(phase.reductions):
        slot = frame.schedule.sums[r]
        lines.append(f"const double f{k} = fold_partials<{_fold(r)}>(t, first, end, {slot}, s);")
        sums.append(f"sum[{slot}] = f{k};")
    block = Block(Cuda(), frame.uniform_leaf)
    texts = block.emit(store.value for store in phase.uniform_stores)
    writes = []
    for store, text in zip(phase.uniform_stores, texts, strict=True):
        array, position = frame.index[store.buffer]
        if array == "number":
            writes.append(f"number_out[{position}] = double({text});")
        else:
            writes.append(f"*{frame.column(store.buffer, store.value.dtype)} = {text};")
    return lines + _by_one_thread(sums + block.lines + writes)


def _total_part(frame: _Frame, phase: Phase, total: Total) -> list[str]:
    """Return what the block that arrives last of all does once."""
    if not total.stores:
        return []
    reduction = phase.reductions[0]
    block = Block(Cuda(), frame.uniform_leaf)
    texts = block.emit(store.value for store in total.stores)
    writes = []
    for store, text in zip(total.stores, texts, strict=True):
        if store.buffer == "norm":
            writes.append(f"*({_CTYPES[store.value.dtype]}*)t.norm = {text};")
        else:
            writes.append(f"t.inputs[{frame.index[store.buffer][1]}] = double({text});")
    return [
        "if (!arrives_last(t.arrivals, gridDim.x, s)) return;",
        f"const double {TOTAL} = fold_partials<{_fold(reduction)}>(t, 0, gridDim.x, 0, s);",
        *_by_one_thread(block.lines + writes),
    ]


def _phase_function(frame: _Frame, phase: Phase, name: str, total: Total | None) -> list[str]:
    """Return the function that does one chunk of one phase of one case."""
    lines: list[str] = []
    if phase.reductions or phase.stores:
        lines, names = _uniform_part(frame, phase)
        lines += _element_part(frame, phase, names)
    partials = []
    for k, r in enumerate(phase.reductions):
        lines.append(f"const double p{k} = fold_block<{_fold(r)}>(r{k}, s);")
        partials.append(f"t.partials[chunk * SUMS + {frame.schedule.sums[r]}] = p{k};")
    lines += _by_one_thread(partials)
    if total is not None:
        lines += _total_part(frame, phase, total)
    elif phase.reductions or phase.uniform_stores:
        lines += _finish_part(frame, phase)
    signature = "(const Table& t, int64_t row, int64_t chunk, Shared& s) {"
    return [f"static __device__ void {name}{signature}", *indent(with_sources(lines)), "}", ""]


def _has_work(phase: Phase) -> bool:
    return bool(phase.reductions or phase.stores or phase.uniform_stores)


def _reads_f64(phase: Phase) -> bool:
    """Whether a loop of ``phase`` works on a tensor of f64."""
    roots = [r.operand for r in phase.reductions] + [store.value for store in phase.stores]
    return "f64" in _buffers(roots, phase.stores).values()


def busy_phases(kernel: Kernel) -> frozenset[int]:
    """Return the phases of ``kernel`` that have a kernel; the others only wait for outside code."""
    schedules = [build_schedule(case) for case in kernel.cases]
    return frozenset(p for s in schedules for p, phase in enumerate(s.phases) if _has_work(phase))


def entry(phase: int) -> str:
    """Return the name of the kernel that runs ``phase``."""
    return f"phase_{phase}"


def _entry_function(phase: int, cases: dict[int, str], total: Total | None) -> list[str]:
    """Return the kernel of one phase; a row without work in it does nothing."""
    parameters = ", ".join(f"{kind} {name}" for kind, name, _ in FIELDS)
    body = [f"const Table t = {{{', '.join(name for _, name, _ in FIELDS)}}};"]
    if total is None:
        body.append("if (t.skip != nullptr && *t.skip != 0.0f) return;")
    body += [
        "__shared__ Shared s;",
        "const int64_t chunk = first + blockIdx.x, row = t.chunk_row[chunk];",
        "switch (t.kinds[row]) {",
        *indent([f"case {case}: return {name}(t, row, chunk, s);" for case, name in cases.items()]),
        "}",
    ]
    head = f'extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) {entry(phase)}('
    return [head, f"    {parameters}, int64_t first) {{", *indent(body), "}", ""]


def emit_cuda(kernel: Kernel, total: Total | None = None) -> str:
    """Return the CUDA C++ source of ``kernel``: one kernel a phase.

    With ``total``, the kernel has one phase, and what counts are the sums of the chunks, the first
    of them over all rows together.
    """
    schedules = [build_schedule(case) for case in kernel.cases]
    index = _leaf_index(kernel)
    phases = [phase for schedule in schedules for phase in schedule.phases]
    uniforms = max(1, *(len(phase.uniforms) for phase in phases))
    constants = {
        "THREADS": THREADS,
        "RESIDENT": resident_blocks(any(map(_reads_f64, phases)), uniforms),
        "COLUMNS": len(kernel.columns),
        "NUMBERS": len(kernel.numbers),
        "SUMS": max(len(s.sums) for s in schedules),
        "UNIFORMS": uniforms,
    }
    table = [f"  {kind} {name};  // {shape}" for kind, name, shape in FIELDS]
    lines = [f"// {kernel.name}", PRELUDE, "struct Table {", *table, "};", ""]
    lines += [f"static constexpr int {name} = {value};" for name, value in constants.items()]
    lines += ["", BLOCK]
    entries: dict[int, dict[int, str]] = {}
    for c, schedule in enumerate(schedules):
        frame = _Frame(kernel, schedule, index)
        for p, phase in enumerate(schedule.phases):
            if _has_work(phase):
                name = entries.setdefault(p, {})[c] = f"case_{c}_{p}"
                lines += _phase_function(frame, phase, name, total)
    for p, names in sorted(entries.items()):
        lines += _entry_function(p, names, total)
    return "\n".join(lines).rstrip("\n") + "\n"
