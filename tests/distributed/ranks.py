"""Two processes that are the ranks of a Gloo group on loopback, and run what tests give them.

Starting torch twice takes seconds, so the processes live as long as all goes well: a job that fails
or hangs ends them, and the next one starts new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

JOB_SECONDS = 240
GROUP_SECONDS = 60


def free_port() -> int:
    """Return a port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def join_group(rank: int, port: int, world: int, seconds: float = GROUP_SECONDS) -> None:
    """Make this process a rank of a Gloo group on loopback."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=seconds))


def _serve(rank: int, port: int, world: int, pipe: Connection) -> None:
    import torch

    os.environ["MPCOMPILE_VERIFY_GRAPH"] = "1"
    torch.set_num_threads(1)
    join_group(rank, port, world)
    while True:
        job = pipe.recv()
        torch.manual_seed(0)
        try:
            pipe.send((True, job[0](rank, *job[1:])))
        except BaseException:  # noqa: BLE001  # whatever it is, the parent's test reports it
            pipe.send((False, traceback.format_exc()))
        torch._dynamo.reset()


class Ranks:
    """The processes; ``run`` gives each the same function with its rank as first argument."""

    def __init__(self, world: int = 2) -> None:
        self._world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what ``function(rank, *args)`` gave on each rank.

        Raises:
            AssertionError: it raised on a rank, or took too long.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, *args))
        results = [self._receive(rank) for rank in range(self._world)]
        failures = [f"rank {r}: {text}" for r, (ok, text) in enumerate(results) if not ok]
        if failures:
            self.stop()
        assert not failures, "\n".join(failures)
        return [result for _, result in results]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        pipe = self._pipes[rank]
        if not pipe.poll(JOB_SECONDS):
            return False, f"no answer in {JOB_SECONDS} seconds"
        try:
            answer: tuple[bool, Any] = pipe.recv()
        except EOFError:
            return False, "the process ended"
        return answer

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        for rank in range(self._world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, port, self._world, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []
