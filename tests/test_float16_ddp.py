"""Two ranks, one of which overflows: both skip the step, and their scales stay equal."""

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
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(F.gelu(self.body(x)))

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
for index in range(5):
    generator = torch.Generator().manual_seed(2 * index + rank)
    x = torch.randn(6, 8, generator=generator)
    if rank == 1 and index == 3:
        x[0, 0] = float("nan")
    before = [p.detach().clone() for p in net.parameters()]
    compiled(x, torch.randint(4, (6,), generator=generator))
    same = all(torch.equal(p, b) for p, b in zip(net.parameters(), before))
    scale = mpcompile.state_dict(compiled)["loss_scale"]["cpu"]["scale"]
    total = sum(p.double().sum().item() for p in net.parameters())
    print(index, same, bool(mpcompile.skipped(compiled)), scale, total.hex(), flush=True)
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
    assert len(one) == 5
    assert [line.split()[1:4] for line in one] == [
        ["False", "False", "65536.0"],
        ["False", "False", "65536.0"],
        ["False", "False", "65536.0"],
        ["True", "True", "32768.0"],
        ["False", "False", "32768.0"],
    ]
