"""The private interfaces of DistributedDataParallel that we read or set: all of them are here.

``Reducer._update_process_group``, ``Reducer._get_zeros_like_grad_buckets``, ``_run_ddp_forward``,
``_join_config``, ``_use_python_reducer``, ``_delay_all_reduce_params``,
``_static_graph_delay_allreduce_enqueued``, ``_has_rebuilt_buckets``, ``_get_active_ddp_module``,
``_get_ddp_logging_data``, ``bucket_bytes_cap``, ``bucket_bytes_cap_default``, ``modules_buffers``,
``_distributed_broadcast_coalesced``, ``broadcast_bucket_size``, ``require_forward_param_sync`` and
``_DEFAULT_FIRST_BUCKET_BYTES``; of a process group ``_device_types``, ``_get_backend`` and
``options._timeout``, seen in torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from mpcompile.distributed.plan import Bucket, wire_of


def set_reducer_group(ddp: DistributedDataParallel, group: ProcessGroup) -> None:
    """Let the reducer of ``ddp`` send through ``group``."""
    ddp.reducer._update_process_group(group)


def refusal(ddp: DistributedDataParallel) -> str:
    """Return why the reducer of ``ddp`` has to send as stock torch does, or nothing."""
    if ddp._use_python_reducer:
        return "optimize_ddp='python_reducer' has no buckets; leave that setting at its default"
    if ddp._join_config.enable:
        return "join(): ranks that ran out of inputs repeat stock float32 all-reduces"
    hook = ddp._get_ddp_logging_data().get("comm_hook", "")
    if hook:
        return f"the communication hook {hook} decides what is sent; do not register one"
    sparse = [name for name, module in ddp.module.named_modules() if _is_sparse(module)]
    if sparse:
        return f"{sparse[0]} has sparse gradients; build it with sparse=False"
    return ""


def graph_refusal(ddp: DistributedDataParallel) -> str:
    """Return why a graph cannot do what ``ddp`` does around a forward, or nothing."""
    return refusal(ddp) or next((why for is_so, why in _beyond_graphs(ddp) if is_so), "")


def _beyond_graphs(ddp: DistributedDataParallel) -> Iterator[tuple[bool, str]]:
    """Yield what a graph cannot do, and whether ``ddp`` does it."""
    yield (
        ddp.find_unused_parameters and not ddp.static_graph,
        "find_unused_parameters: ranks may use other parameters, so reductions differ",
    )
    yield (
        getattr(ddp, "skip_all_reduce_unused_params", False),
        "skip_all_reduce_unused_params: its reducer finds out what is used",
    )
    yield (
        delays_reductions(ddp),
        "delay_all_reduce_named_params: a hook of the wrapper reduces them",
    )
    yield (
        ddp.mixed_precision is not None,
        "mixed_precision of DistributedDataParallel casts parameters by itself",
    )
    yield (
        any(isinstance(module, torch.nn.SyncBatchNorm) for module in ddp.modules()),
        "SyncBatchNorm communicates in the middle of the model",
    )
    yield (
        bool(getattr(ddp, "bucket_bytes_cap_list", None)),
        "bucket_cap_mb_list fits the buckets of its reducer only",
    )
    yield (
        any(_num_hooks(ddp)),
        "hooks on DistributedDataParallel itself; register them on the module inside",
    )
    yield (
        hasattr(ddp, "buffer_hook") or bool(ddp.parameters_to_ignore and ddp.modules_buffers),
        "buffers are not broadcast as they are by default",
    )
    yield (
        reduced_names(ddp) != {name for name, p in named_parameters(ddp) if p.requires_grad},
        "requires_grad was changed after DistributedDataParallel was built",
    )


def delays_reductions(ddp: DistributedDataParallel) -> bool:
    """Whether a hook on one parameter reduces gradients of others, which have to be there then."""
    return bool(getattr(ddp, "_delay_all_reduce_params", None))


def graph_state(ddp: DistributedDataParallel) -> tuple[object, ...]:
    """Return what a graph of ``ddp`` relies on, beside what Dynamo guards; cheap to ask."""
    hook = ddp._get_ddp_logging_data().get("comm_hook", "")
    return (
        hook,
        ddp._join_config.enable,
        ddp._use_python_reducer,
        ddp.static_graph,
        hasattr(ddp, "buffer_hook"),
        id(ddp.process_group),
        _num_hooks(ddp),
    )


def _num_hooks(ddp: DistributedDataParallel) -> tuple[int, ...]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return tuple(len(getattr(ddp, name)) for name in hooks)


def input_device(ddp: DistributedDataParallel) -> torch.device | None:
    """Return where the wrapper moves inputs to; None if it leaves them where they are."""
    return torch.device(ddp.device_type, ddp.device_ids[0]) if ddp.device_ids else None


def reduced_names(ddp: DistributedDataParallel) -> frozenset[str]:
    """Return the names of the parameters that the reducer of ``ddp`` looks after."""
    buckets = read_buckets(ddp, torch.float32)
    return frozenset(name for bucket in buckets for name in bucket.names)


def bucket_bytes(ddp: DistributedDataParallel) -> tuple[int, int]:
    """Return the size of the first bucket and of the others, in bytes of gradients."""
    cap = int(ddp.bucket_bytes_cap)
    first: int = dist._DEFAULT_FIRST_BUCKET_BYTES
    return (min(first, cap) if ddp.bucket_bytes_cap_default else cap), cap


def syncs_buffers(ddp: DistributedDataParallel) -> bool:
    """Whether forwards of ``ddp`` may fetch the buffers of rank 0."""
    asked = getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", True))
    return bool(asked and ddp.modules_buffers)


def broadcast_buffers(
    ddp: DistributedDataParallel, buffers: Sequence[torch.Tensor], averages: bool
) -> None:
    """Overwrite ``buffers`` with those of rank 0 where stock DDP would at the start of a forward.

    ``averages`` is whether a reducing backward follows; only then the next forward fetches again.
    """
    if ddp.will_sync_module_buffers():
        ddp._distributed_broadcast_coalesced(buffers, ddp.broadcast_bucket_size, 0)
    ddp.require_forward_param_sync = averages


def communicates(ddp: DistributedDataParallel) -> bool:
    """Whether the forward of ``ddp`` that begins now, or its backward, involves other ranks."""
    return will_reduce(ddp) or ddp.will_sync_module_buffers()


def words_group(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """Return a group of the ranks of ``ddp`` that moves CPU tensors.

    The host reads what it moves; with NCCL it would have to wait for the device. All ranks must
    ask: where the group has no backend for CPUs, one over Gloo is made.
    """
    group: dist.ProcessGroup = ddp.process_group
    if moves_cpu_tensors(group):
        return group
    if group not in _words_groups:
        ranks = dist.get_process_group_ranks(group)
        _words_groups[group] = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=True, timeout=_timeout(group)
        )
    return _words_groups[group]


def moves_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` has a backend for CPUs."""
    return torch.device("cpu") in group._device_types


_words_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def _timeout(group: dist.ProcessGroup) -> timedelta:
    """Return how long the collectives of ``group`` wait for other ranks."""
    found: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return found


def _is_sparse(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse


def is_inside_forward() -> bool:
    """Whether the caller runs inside the forward of a DDP module."""
    return DistributedDataParallel._get_active_ddp_module() is not None


def will_reduce(ddp: DistributedDataParallel) -> bool:
    """Whether the backward of a forward that runs now reduces gradients."""
    return torch.is_grad_enabled() and bool(ddp.require_backward_grad_sync)


def keeps_ranks_together(ddp: DistributedDataParallel) -> bool:
    """Whether all ranks take the step that runs now, and average its gradients.

    Under ``join()`` a rank that ran out of inputs repeats the collectives of stock DDP only.
    """
    return bool(ddp.require_backward_grad_sync and not ddp._join_config.enable)


def plan_version(ddp: DistributedDataParallel) -> object:
    """Return what changes when the reducer rebuilds its buckets."""
    return (id(ddp.reducer), ddp._has_rebuilt_buckets)


def is_read_early(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer reads buckets before callbacks run that are queued in this backward.

    A static graph's first backward reduces everything in one callback at its end.
    """
    return bool(ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued)


def named_parameters(ddp: DistributedDataParallel) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the parameters that ``ddp`` keeps equal across ranks, frozen ones included."""
    for name, parameter in ddp.module.named_parameters():
        if name not in ddp.parameters_to_ignore:
            yield name, parameter


def read_buckets(ddp: DistributedDataParallel, wire: torch.dtype) -> tuple[Bucket, ...]:
    """Return the reducer's buckets in the order of sending."""
    if ddp.process_group.size() == 1:
        wire = torch.float32  # nothing is sent
    names = {parameter: name for name, parameter in named_parameters(ddp)}
    found = []
    for index, bucket in enumerate(ddp.reducer._get_zeros_like_grad_buckets()):
        members = bucket.parameters()
        dtype = bucket.buffer().dtype
        found.append(
            Bucket(
                index=index,
                names=tuple(names[member] for member in members),
                sizes=tuple(member.numel() for member in members),
                dtype=dtype,
                wire=wire_of(dtype, wire),
            )
        )
    return tuple(found)
