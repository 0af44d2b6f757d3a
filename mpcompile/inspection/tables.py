"""Spell a report as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from tabulate import tabulate

from mpcompile.distributed.plan import Bucket
from mpcompile.distributed.record import SyncRecord
from mpcompile.graph.printer import format_dtype
from mpcompile.graph.roles import GraphKind
from mpcompile.inspection.memory import MemoryRole
from mpcompile.inspection.report import OverflowRecord, RegionReport, StepReport
from mpcompile.pass_base import PassRecord
from mpcompile.runtime.record import ScaleRecord, UpdateRecord

_MAX_CASTS = 20
_BUCKET_HEADERS = ("bucket", "parameters", "dtypes", "bytes")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_report(report: StepReport) -> str:
    """Return every table of ``report``, or one line if nothing was compiled."""
    if not report.regions:
        return "mpcompile: nothing was compiled yet. Call the step once."
    parts = [
        _title("Regions", _format_regions(report.regions)),
        _title("What broke the graph", _format_breaks(report.breaks)),
        _title("Passes", _format_passes(report.regions)),
        _title("Ops and matmul FLOPs by dtype", _format_totals(report.regions)),
        _title("Saved for backward", _format_saved(report.regions)),
        _title("Memory at the peak of each graph", _format_peaks(report)),
        _title("Casts", _format_casts(report.regions)),
        _title("Gradients between ranks", _format_syncs(report.syncs)),
        _title("Buckets", _format_buckets(report.syncs)),
        _title("Buckets in graphs", _format_graph_buckets(report.regions)),
        _title("Updates", _format_updates(report.updates)),
        _title("Loss scale", _format_loss_scale(report.loss_scale)),
        _title("First Inf or NaN", _format_overflow(report.overflow)),
    ]
    dtype = str(report.config.dtype).removeprefix("torch.")
    head = (
        f"mpcompile: dtype {dtype}, table {report.config.table}, lowering {report.config.lowering}"
    )
    told = "\n".join([head, _capture(report), *_cached(report.regions)])
    return "\n\n".join([told, *(part for part in parts if part)])


def _cached(regions: Sequence[RegionReport]) -> Iterator[str]:
    """Yield a line if graphs were compiled before, as times of passes are then of that run."""
    numbers = [str(region.index) for region in regions if region.from_cache]
    if numbers:
        yield f"from the cache, with what passes did when they ran: region {', '.join(numbers)}"


def _capture(report: StepReport) -> str:
    """Return one line on what is one graph."""
    if not report.whole:
        return "captured: in regions"
    whole = "; ".join(dict.fromkeys(report.whole))
    calls = "1 call" if report.replayed == 1 else f"{report.replayed} calls"
    checked = f"; {calls} replayed eagerly and compared" if report.replayed else ""
    return f"captured: whole, {whole}{checked}"


def format_bytes(count: int) -> str:
    """Return ``1.5 MiB`` for 1572864."""
    size = float(count)
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_flops(count: int) -> str:
    """Return ``1.5 GFLOP`` for 1500000000."""
    size = float(count)
    for unit in ("", "k", "M", "G", "T", "P"):
        if size < 1000 or unit == "P":
            return f"{size:.3g} {unit}FLOP"
        size /= 1000
    raise AssertionError("unreachable")


def _title(title: str, table: str) -> str:
    return f"{title}\n{table}" if table else ""


def _table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    listed = [list(row) for row in rows]
    return tabulate(listed, headers=list(headers), disable_numparse=True) if listed else ""


def _kind(region: RegionReport) -> str:
    return region.kind.value if region.kind else "not traced"


def _format_regions(regions: Sequence[RegionReport]) -> str:
    rows = [
        (
            region.index,
            _kind(region),
            region.aten_after.count("\n") + 1 if region.aten_after else 0,
            len(region.casts),
            f"{region.ended_by} ({region.ended_at})" if region.ended_by else "return",
        )
        for region in regions
    ]
    return _table(rows, ("region", "kind", "nodes", "casts", "ended by"))


def _format_breaks(breaks: Sequence[tuple[str, str]]) -> str:
    return _table(((line, reason) for reason, line in breaks), ("line", "reason"))


def _format_passes(regions: Sequence[RegionReport]) -> str:
    """One row a pass, summed over the regions."""
    sums: dict[str, list[PassRecord]] = {}
    for region in regions:
        for record in region.pass_records:
            sums.setdefault(record.name, []).append(record)
    rows = [
        (
            name,
            records[0].stage.value,
            "on" if records[0].enabled else "off",
            sum(record.rewrites for record in records),
            f"{sum(record.time_us for record in records) / 1e3:.1f}",
        )
        for name, records in sums.items()
    ]
    return _table(rows, ("pass", "stage", "on/off", "rewrites", "time ms"))


def _format_totals(regions: Sequence[RegionReport]) -> str:
    rows = (row for region in regions for row in _total_rows(region))
    headers = ("region", "dtype", "ops before", "after", "matmul before", "after")
    return _table(rows, headers)


def _total_rows(region: RegionReport) -> Iterator[tuple[object, ...]]:
    before, after = region.ops_before, region.ops_after
    for dtype in sorted(before.ops.keys() | after.ops.keys() | after.matmul_flops.keys()):
        yield (
            region.index,
            dtype,
            before.ops.get(dtype, 0),
            after.ops.get(dtype, 0),
            format_flops(before.matmul_flops.get(dtype, 0)),
            format_flops(after.matmul_flops.get(dtype, 0)),
        )


def _format_saved(regions: Sequence[RegionReport]) -> str:
    rows = [
        (region.index, dtype, format_bytes(count))
        for region in regions
        for dtype, count in sorted(region.saved_bytes.items())
    ]
    return _table(rows, ("region", "dtype", "activations"))


def _format_peaks(report: StepReport) -> str:
    """One row a region; the state of optimizers is there all the time, in no graph."""
    state = sum(update.state_bytes for update in report.updates)
    rows = []
    for region in report.regions:
        if region.peak is None or region.kind is not GraphKind.TRAINING:
            continue
        held = {**region.peak.bytes, MemoryRole.STATE: state}
        sizes = [format_bytes(held.get(role, 0)) for role in MemoryRole]
        part = "backward" if region.peak.is_backward else "forward"
        where = f"{part} %{region.peak.node}"
        rows.append((region.index, where, *sizes, format_bytes(sum(held.values()))))
    return _table(rows, ("region", "where", *(role.value for role in MemoryRole), "sum"))


def _format_updates(updates: Sequence[UpdateRecord]) -> str:
    """One row a kernel; the time bound is what moving its bytes takes on this machine."""
    rows: list[Sequence[object]] = []
    for update in updates:
        for kernel in update.kernels:
            moved = (format_bytes(kernel.bytes_read), format_bytes(kernel.bytes_written))
            bound = f"{kernel.bound_s * 1e3:.2f}"
            rows.append((update.optimizer, kernel.name, kernel.num_tensors, *moved, bound))
        if not update.kernels:
            reason = update.reason or "ran as eager so far: state was not made yet"
            rows.append((update.optimizer, reason, "", "", "", ""))
    headers = ("optimizer", "kernel, or why none", "tensors", "read", "written", "bound ms")
    return _table(rows, headers)


def _format_loss_scale(record: ScaleRecord | None) -> str:
    if record is None:
        return ""
    own = "none" if record.own_scale == 1 else f"{record.own_scale:g}"
    first = record.first or "none so far"
    row = (f"{record.scale:g}", record.policy, record.overflows, first, own)
    headers = ("scale", "policy", "overflows", "first gradient", "scaling by the program")
    return _table([row], headers)


def _format_overflow(record: OverflowRecord | None) -> str:
    if record is None:
        return ""
    part = "backward" if record.is_backward else "forward"
    row = (record.region, part, record.text, record.line)
    return _table([row], ("region", "graph", "node", "line"))


def _format_syncs(syncs: Sequence[SyncRecord]) -> str:
    rows = []
    for sync in syncs:
        a_step = f"{format_bytes(sync.bytes_a_step)}, {sync.bytes_a_parameter:.2f} a parameter"
        feedback = "on" if sync.error_feedback else "off"
        counts = (sync.num_backwards, sync.num_resent) if sync.buckets else ("", "")
        rows.append(
            (
                f"{sync.module} on {sync.num_ranks} ranks",
                sync.wire,
                a_step if sync.buckets else "",
                *counts,
                feedback,
                sync.sender,
            )
        )
    headers = ("module", "wire", "bytes a step", "reduced", "sent again", "error feedback", "by")
    return _table(rows, headers)


def _format_graph_buckets(regions: Sequence[RegionReport]) -> str:
    """One row a bucket that a graph sends by itself; positions are of nodes in it."""
    rows = [
        (
            region.index,
            *_bucket_cells(found.bucket),
            f"node {found.start} of {found.num_nodes}",
            f"node {found.wait}",
            format_dtype(found.read_as),
        )
        for region in regions
        for found in region.buckets
    ]
    return _table(rows, ("region", *_BUCKET_HEADERS, "starts", "waited for", "read as"))


def _bucket_cells(bucket: Bucket) -> tuple[object, ...]:
    dtypes = f"{format_dtype(bucket.dtype)} -> {format_dtype(bucket.wire)}"
    members = f"{bucket.names[0]} .. {bucket.names[-1]} ({len(bucket.names)})"
    return (bucket.index, members, dtypes, format_bytes(bucket.wire_bytes))


def _format_buckets(syncs: Sequence[SyncRecord]) -> str:
    """One row a bucket; times are of the last backward, from the start of the first bucket."""
    rows = []
    for sync in syncs:
        for bucket, times in zip_longest(sync.buckets, sync.times):
            when = (f"{times.start_ms:.1f}", f"{times.arrive_ms:.1f}") if times else ("", "")
            rows.append((sync.module, *_bucket_cells(bucket), *when, f"{sync.wait_ms:.1f}"))
    return _table(rows, ("module", *_BUCKET_HEADERS, "start ms", "arrives", "waited for from"))


def _format_casts(regions: Sequence[RegionReport]) -> str:
    """Equal casts of repeated layers are one row with a count; the rest is cut off with a note."""
    counted: dict[tuple[object, ...], int] = {}
    for region in regions:
        for found in region.casts:
            key = (region.index, found.dtypes, found.shape, found.line, found.reason)
            counted[key] = counted.get(key, 0) + 1
    rows = [(*key[:1], count, *key[1:]) for key, count in counted.items()]
    headers = ("region", "casts", "dtypes", "shape", "line", "reason")
    table = _table(rows[:_MAX_CASTS], headers)
    left_out = len(rows) - _MAX_CASTS
    if left_out > 0:
        table += f"\n... and {left_out} more rows: report.regions[i].casts has every cast"
    return table
