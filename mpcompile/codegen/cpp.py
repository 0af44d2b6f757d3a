"""C++ spellings, and the frame that runs a kernel over chunks of all tensors together.

The text needs no header of torch and depends on the cases only, never on how many tensors there
are: a table of pointers, slots and chunks comes in at run time. Chunks are fixed when the table is
made and partial sums are combined in chunk order, so results do not depend on the thread count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpcompile.codegen.cpp_frame import PARTIALS, PRELUDE, RUN
from mpcompile.codegen.emitter import Block, indent, with_sources
from mpcompile.codegen.expr import Expr, Load, Reduce, Scalar, Store, postorder
from mpcompile.codegen.schedule import Kernel, Phase, Schedule, build_schedule, count_phases

_CTYPES = {
    "f16": "uint16_t",
    "bf16": "uint16_t",
    "f32": "float",
    "f64": "double",
    "i64": "int64_t",
    "bool": "bool",
}

_SPELLINGS = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "fma": "std::fma({0}, {1}, {2})",
    "div_by": "div_by({0}, {1}, {2})",
    "neg": "(-{0})",
    "abs": "std::abs({0})",
    "sqrt": "std::sqrt({0})",
    "pow": "std::pow({0}, {1})",
    "exp": "std::exp({0})",
    "log": "std::log({0})",
    "log2": "std::log2({0})",
    "sin": "std::sin({0})",
    "cos": "std::cos({0})",
    "tanh": "std::tanh({0})",
    "floor": "std::floor({0})",
    "ceil": "std::ceil({0})",
    "trunc": "std::trunc({0})",
    "round": "std::nearbyint({0})",
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
"""The operations that C++ spells; every target spells the same."""


class Cpp:
    """The spellings of C++17."""

    def ctype(self, dtype: str) -> str:
        """Return the type of a value of ``dtype``; 16-bit floats travel as their bits."""
        return _CTYPES[dtype]

    def literal(self, value: float, dtype: str) -> str:
        """Return an exact literal."""
        if dtype == "bool":
            return "true" if value else "false"
        if dtype == "i64":
            return f"int64_t({int(value)})"
        suffix = "f" if dtype == "f32" else ""
        if math.isnan(value) or math.isinf(value):
            name = "nan" if math.isnan(value) else "inf"
            call = f"__builtin_{name}{suffix}({chr(34) * 2 if name == 'nan' else ''})"
            return f"(-{call})" if value < 0 else call
        return f"({value.hex()}{suffix})" if value < 0 else f"{float(value).hex()}{suffix}"

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
        array, position = self.index[expr.name]
        if array == "ptr":
            return f"*{self.column(expr.name, expr.dtype)}"
        return f"({_CTYPES[expr.dtype]}){array}[{position}]"


def _leaf_index(kernel: Kernel) -> dict[str, tuple[str, int]]:
    arrays = {
        "ptr": kernel.columns,
        "number": kernel.numbers,
        "shared": kernel.shared,
        "input": kernel.inputs,
        "total": [f"total.{number}" for number in range(len(kernel.totals))],
    }
    return {name: (a, i) for a, names in arrays.items() for i, name in enumerate(names)}


def _finish_function(frame: _Frame, phase: Phase, name: str) -> list[str]:
    """Return the function that does what a tensor needs once, after its elements."""
    folds = []
    for r in phase.reductions:
        k = frame.schedule.sums[r]
        folds.append(f"sum[{k}] = {'add' if r.op == 'sum' else 'max'}_partials(t, row, {k});")
    block = Block(Cpp(), frame.uniform_leaf)
    values = [store.value for store in phase.uniform_stores]
    texts = block.emit([*values, *(term.value for term in phase.terms)])
    writes = []
    for term, text in zip(phase.terms, texts[len(values) :], strict=True):
        writes.append(f"term[{term.number}] = double({text});")
    for store, text in zip(phase.uniform_stores, texts, strict=False):
        if frame.index[store.buffer][0] == "number":
            writes.append(f"number_out[{frame.index[store.buffer][1]}] = double({text});")
        else:
            writes.append(f"*{frame.column(store.buffer, store.value.dtype)} = {text};")
    body = indent(with_sources(folds + block.lines + writes))
    return [f"static void {name}(const Table& t, int64_t row) {{", *body, "}", ""]


def _element_function(frame: _Frame, phase: Phase, name: str) -> list[str]:
    """Return the function that runs over the elements of one chunk."""
    roots = [r.operand for r in phase.reductions] + [store.value for store in phase.stores]
    head, positions = [], list[int]()
    for buffer, (dtype, written) in _buffers(roots, phase.stores).items():
        kind = _CTYPES[dtype] if written else f"const {_CTYPES[dtype]}"
        position = frame.index[buffer][1]
        head.append(f"{kind}* __restrict b{position} = ({kind}*)ptr[{position}];")
        positions.append(position)
    uniform = Block(Cpp(), frame.uniform_leaf, "u")
    names = dict(zip(phase.uniforms, uniform.emit(phase.uniforms), strict=True))

    def leaf(expr: Expr) -> str | None:
        return f"b{frame.index[expr.buffer][1]}[i]" if isinstance(expr, Load) else None

    block = Block(Cpp(), leaf)
    block.names.update(names)
    texts = block.emit(roots)
    count = len(phase.reductions)
    body = [
        _accumulate(r, k, text)
        for k, (r, text) in enumerate(zip(phase.reductions, texts, strict=False))
    ]
    for store, text in zip(phase.stores, texts[count:], strict=True):
        body.append(f"b{frame.index[store.buffer][1]}[i] = {text};")
    body = block.lines + body
    if count:
        slots = [frame.schedule.sums[r] for r in phase.reductions]
        loop = _reduction_loop(phase, body, slots, positions)
    else:
        loop = ["#pragma omp simd", "for (int64_t i = begin; i < end; i++) {", *indent(body), "}"]
    lines = with_sources(head + uniform.lines + loop)
    signature = "(const Table& t, int64_t row, int64_t begin, int64_t end, double* partial) {"
    return [f"static void {name}{signature}", *indent(lines), "}", ""]


def _reduction_loop(
    phase: Phase, body: list[str], slots: Sequence[int], positions: Sequence[int]
) -> list[str]:
    """Return a loop with LANES accumulators for each reduction, folded in order at the end.

    One accumulator would make each addition wait for the one before. A loop that only reads is
    bound by how early it asks for memory; hardware stops asking at the end of each page.
    """
    count = range(len(slots))
    arguments = ", ".join(f"double& r{k}" for k in count)
    lanes = [f"double lane{k}[LANES] = {{0}};" for k in count]
    each = ", ".join(f"lane{k}[j]" for k in count)
    last = ", ".join(f"lane{k}[0]" for k in count)
    folds = [_accumulate(r, k, f"lane{k}[j]") for k, r in enumerate(phase.reductions)]
    return [
        f"const auto element = [&](int64_t i, {arguments}) {{",
        *indent(body),
        "};",
        *lanes,
        "int64_t i = begin;",
        "for (; i + LANES <= end; i += LANES) {",
        *(f"  ask_ahead(b{position} + i);" for position in positions),
        "  #pragma omp simd",
        f"  for (int64_t j = 0; j < LANES; j++) element(i + j, {each});",
        "}",
        f"for (; i < end; i++) element(i, {last});",
        *(f"double r{k} = 0;" for k in count),
        "for (int64_t j = 0; j < LANES; j++) {",
        *indent(folds),
        "}",
        *(f"partial[{slot}] = r{k};" for k, slot in zip(count, slots, strict=True)),
    ]


def _accumulate(reduction: Reduce, position: int, text: str) -> str:
    if reduction.op == "sum":
        return f"r{position} += double({text});"
    return f"r{position} = max_nan(double({text}), r{position});"


def _buffers(roots: Sequence[Expr], stores: Sequence[Store]) -> dict[str, tuple[str, bool]]:
    """Return (dtype, written) of each buffer that a loop touches."""
    written = {store.buffer: store.value.dtype for store in stores}
    found = {buffer: (dtype, True) for buffer, dtype in written.items()}
    for expr in postorder(roots):
        if isinstance(expr, Load) and expr.buffer not in found:
            found[expr.buffer] = (expr.dtype, False)
    return dict(sorted(found.items()))


def _dispatch(name: str, arguments: str, call: str, table: dict[tuple[int, int], str]) -> list[str]:
    """Return the function that picks a case and a phase; a row without work does nothing."""
    cases = [f"case {c} * PHASES + {p}: return {f}({call});" for (c, p), f in table.items()]
    head = f"static void {name}(const Table& t, int64_t phase, {arguments}) {{"
    return [
        head,
        *indent(["switch (t.kinds[row] * PHASES + phase) {", *indent(cases), "}"]),
        "}",
        "",
    ]


def _total_function(kernel: Kernel) -> list[str]:
    """Return the function that folds the terms of all tensors at the end of a phase."""
    folds = [
        f"if (phase == {fold.phase}) t.totals[{number}] = "
        f"{'add' if fold.op == 'sum' else 'max'}_terms(t, begin, end, {number});"
        for number, fold in enumerate(kernel.totals)
    ]
    head = "static void fold_totals(const Table& t, int64_t phase, int64_t begin, int64_t end) {"
    return [head, *indent(folds), "}", ""]


@dataclass(frozen=True)
class Sizes:
    """How many phases a kernel has, and how many sums a row has between them."""

    phases: int
    sums: int


def measure(kernel: Kernel) -> Sizes:
    """Return the sizes that the table of ``kernel`` depends on."""
    schedules = [build_schedule(case) for case in kernel.cases]
    return Sizes(count_phases(kernel), max(len(s.sums) for s in schedules))


def emit_cpp(kernel: Kernel) -> str:
    """Return the C++ source of ``kernel``; it exports ``run``."""
    schedules = [build_schedule(case) for case in kernel.cases]
    sizes, index = measure(kernel), _leaf_index(kernel)
    constants = {
        "LANES": 32,
        "COLUMNS": len(kernel.columns),
        "NUMBERS": len(kernel.numbers),
        "SHARED": len(kernel.shared),
        "SUMS": sizes.sums,
        "TOTALS": len(kernel.totals),
        "PHASES": sizes.phases,
    }
    lines = [f"// {kernel.name}", PRELUDE]
    lines += [f"static constexpr int64_t {name} = {value};" for name, value in constants.items()]
    lines += ["", PARTIALS]
    elements: dict[tuple[int, int], str] = {}
    finish: dict[tuple[int, int], str] = {}
    for c, schedule in enumerate(schedules):
        frame = _Frame(kernel, schedule, index)
        for p, phase in enumerate(schedule.phases):
            if phase.reductions or phase.stores:
                elements[c, p] = f"elements_{c}_{p}"
                lines += _element_function(frame, phase, elements[c, p])
            if phase.reductions or phase.uniform_stores or phase.terms:
                finish[c, p] = f"finish_{c}_{p}"
                lines += _finish_function(frame, phase, finish[c, p])
    chunk = "int64_t row, int64_t begin, int64_t end, double* partial"
    lines += _dispatch("elements", chunk, "t, row, begin, end, partial", elements)
    lines += _dispatch("finish", "int64_t row", "t, row", finish)
    lines += _total_function(kernel)
    return "\n".join([*lines, RUN])
