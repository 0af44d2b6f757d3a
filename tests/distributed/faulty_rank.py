"""One rank of a run in which rank 1 fails. Arguments: rank, port, phase, fault.

The phases "forward", "backward" and "update" are lines of a step in regions; those of ``METHODS``
are calls that a step makes which is one graph. Rank 0 prints what it ended with, as a line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpcompile.distributed import module
from mpcompile.distributed.coordination import Coordinator
from mpcompile.distributed.module import ModuleSync
from mpcompile.errors import SyncError
from tests.distributed.ranks import join_group

SECONDS = 6.0
FAULTY_STEP = 1
METHODS: dict[str, Any] = {
    "offer": Coordinator,
    "confirm": Coordinator,
    "broadcast": ModuleSync,
    "send": ModuleSync,
    "receive": ModuleSync,
    "compare_parameters": module,
}


class Fault:
    """Strikes rank 1 at one phase of its second step, or of the first where a graph is offered."""

    def __init__(self, rank: int, phase: str, kind: str) -> None:
        self._rank, self._phase, self._kind = rank, phase, kind
        self.step = 0
        self.since = time.perf_counter()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def at(self, phase: str) -> None:
        if phase == self._phase:
            self.since = time.perf_counter()
        faulty_step = 0 if self._phase == "offer" else FAULTY_STEP
        if self._rank == 0 or phase != self._phase or self.step != faulty_step:
            return
        if self._kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)  # threads of Gloo as well
        elif self._kind == "hang":
            time.sleep(10 * SECONDS)
        raise ValueError("the user's own error")


def strike_in(fault: Fault, phase: str) -> None:
    """Have ``fault`` strike where the method or function is called that ``phase`` names."""
    owner = METHODS[phase]
    original = getattr(owner, phase)

    def striking(*args: Any, **kwargs: Any) -> Any:
        fault.at(phase)
        return original(*args, **kwargs)

    setattr(owner, phase, striking)


def build(fault: Fault, phase: str) -> Any:
    torch.manual_seed(0)
    first = nn.Linear(12, 24)
    if phase in METHODS:
        strike_in(fault, phase)
    else:
        first.weight.register_hook(lambda grad: fault.at("backward"))
    net = nn.Sequential(first, nn.BatchNorm1d(24), nn.Linear(24, 6))
    model = DistributedDataParallel(net, bucket_cap_mb=0.0005)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        if phase not in METHODS:
            fault.at("forward")
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        if phase not in METHODS:
            fault.at("update")
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return torch.compile(step, backend="mpcompile", options={"lowering": "eager", "check_sync": 1})


def main(rank: int, port: int, phase: str, kind: str) -> None:
    torch.set_num_threads(1)
    join_group(rank, port, 2, SECONDS)
    fault = Fault(rank, phase, kind)
    step = build(fault, phase)
    try:
        for fault.step in range(3):
            fault.since = time.perf_counter()
            step(torch.randn(8, 12), torch.randint(6, (8,)))
            fault.at("between")
    except RuntimeError as error:
        found = {
            "type": type(error).__name__,
            "is_sync": isinstance(error, SyncError),
            "text": "\n".join([str(error), *getattr(error, "__notes__", ())]),
            "seconds": time.perf_counter() - fault.since,
        }
        print(json.dumps(found), flush=True)
        os._exit(3)  # a group that has lost a rank cannot be left in good order
    print(json.dumps({"type": "", "text": "trained on", "seconds": 0.0}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
