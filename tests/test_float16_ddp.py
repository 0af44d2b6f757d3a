"""Two ranks, one of which overflows: both skip the step as a whole, and their scales stay equal."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
import mpcompile

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}"
)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(F.gelu(self.norm(self.body(x))))

def everything():
    state = [value for entries in opt.state.values() for value in entries.values()]
    return [value.detach().clone() for value in (*net.parameters(), *state)]

def total(tensors):
    return sum(tensor.double().sum().item() for tensor in tensors).hex()

torch.manual_seed(0)
net = Net()
model = nn.parallel.DistributedDataParallel(net)
opt = torch.optim.AdamW(model.parameters(), lr=0.01)

def step(x, labels):
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()

compiled = torch.compile(
    step, backend="mpcompile", options={"dtype": "float16", "lowering": "eager"}
)
BAD = {2: 1, 4: 0}  # in which step which rank overflows
for index in range(6):
    generator = torch.Generator().manual_seed(2 * index + rank)
    x = torch.randn(6, 8, generator=generator)
    if BAD.get(index) == rank:
        x[0, 0] = float("nan")
    before, statistics = everything(), total(net.buffers())
    compiled(x, torch.randint(4, (6,), generator=generator))
    after = everything()
    same = len(before) == len(after) and all(map(torch.equal, before, after))
    scale = mpcompile.state_dict(compiled)["loss_scale"]["cpu"]["scale"]
    skipped = bool(mpcompile.skipped(compiled))
    print(index, same, skipped, scale, total(net.parameters()), end=" ", flush=True)
    # DDP gives all ranks the buffers of the first, so these are what it had before.
    print(total(net.buffers()) if skipped else "", flush=True)
    if skipped and rank == 0:
        assert total(net.buffers()) == statistics
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_overflow_on_one_rank_skips_the_step_on_both() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(port)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    one, two = (process.communicate(timeout=250)[0].splitlines() for process in ranks)
    assert one == two
    assert [line.split()[1:4] for line in one] == [
        ["False", "False", "65536.0"],
        ["False", "False", "65536.0"],
        ["True", "True", "32768.0"],
        ["False", "False", "32768.0"],
        ["True", "True", "16384.0"],
        ["False", "False", "16384.0"],
    ]
