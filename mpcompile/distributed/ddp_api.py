"""The private interfaces of DistributedDataParallel that we read or set: all of them are here.

``Reducer._update_process_group``, ``Reducer._get_zeros_like_grad_buckets``, ``_run_ddp_forward``,
``_join_config``, ``_use_python_reducer``, ``_delay_all_reduce_all_params``,
``_static_graph_delay_allreduce_enqueued``, ``_has_rebuilt_buckets``, ``_get_active_ddp_module``
and ``_get_ddp_logging_data``, seen in torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
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
    if ddp._delay_all_reduce_all_params:
        return "all gradients are delayed by delay_all_reduce_named_params; leave it out"
    if ddp._join_config.enable:
        return "join(): ranks that ran out of inputs repeat stock float32 all-reduces"
    hook = ddp._get_ddp_logging_data().get("comm_hook", "")
    if hook:
        return f"the communication hook {hook} decides what is sent; do not register one"
    sparse = [name for name, module in ddp.module.named_modules() if _is_sparse(module)]
    if sparse:
        return f"{sparse[0]} has sparse gradients; build it with sparse=False"
    return ""


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
