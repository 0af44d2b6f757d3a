"""Run emitted CUDA text on the host: a loop over blocks and over the threads of each.

The text is compiled as it stands, between declarations of what CUDA has built in. Threads of a
block are coroutines that change hands at ``__syncthreads``; a barrier that not all threads reach is
an error, and so is an access of 16 or 8 bytes to an address that is not aligned.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mpcompile.codegen.build import build_library
from mpcompile.codegen.cuda_frame import FIELDS, THREADS

BUILT_IN = """\
// CUDA text on the host.
#pragma GCC optimize("O1")
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __syncthreads() shim::wait_for_block(__LINE__)

namespace shim {
struct Index { unsigned x; };
static Index threadIdx, blockIdx, gridDim;
static int64_t num_wide, num_misaligned, num_split_barriers;

template <int N> struct __attribute__((may_alias)) Wide {
  unsigned item[N];
  Wide() = default;
  Wide(const Wide& from) { take(from, &from); }
  Wide& operator=(const Wide& from) { take(from, this); return *this; }
  void take(const Wide& from, const void* address) {
    num_wide++;
    num_misaligned += reinterpret_cast<uintptr_t>(address) % (4 * N) != 0;
    for (int k = 0; k < N; k++) item[k] = from.item[k];
  }
};

static constexpr int COUNT = THREADS_OF_A_BLOCK, STACK = 64 << 10;
static ucontext_t scheduler, contexts[COUNT];
static char stacks[COUNT][STACK];
static int line[COUNT];  // of the barrier at which a thread waits; 0: it is done
static int current;
static void (*body)();

static void wait_for_block(int at) {
  const int me = current;
  line[me] = at;
  swapcontext(&contexts[me], &scheduler);
}

static void run_thread() {
  body();
  line[current] = 0;
}

static void run_block(bool is_reversed) {
  for (int t = 0; t < COUNT; t++) {
    getcontext(&contexts[t]);
    contexts[t].uc_stack.ss_sp = stacks[t];
    contexts[t].uc_stack.ss_size = STACK;
    contexts[t].uc_link = &scheduler;
    line[t] = -1;
    makecontext(&contexts[t], run_thread, 0);
  }
  while (line[0]) {
    for (int k = 0; k < COUNT; k++) {
      current = is_reversed ? COUNT - 1 - k : k;
      threadIdx.x = current;
      if (line[current]) swapcontext(&scheduler, &contexts[current]);
    }
    for (int t = 1; t < COUNT; t++) num_split_barriers += line[t] != line[0];
  }
}
}  // namespace shim

namespace emitted {
using shim::blockIdx;
using shim::gridDim;
using shim::threadIdx;
using uint4 = shim::Wide<4>;
using uint2 = shim::Wide<2>;
using std::abs;
using std::ceil;
using std::cos;
using std::exp;
using std::floor;
using std::fma;
using std::log;
using std::log2;
using std::memcpy;
using std::pow;
using std::rint;
using std::sin;
using std::sqrt;
using std::tanh;
using std::trunc;

static unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static double __longlong_as_double(long long u) { double x; memcpy(&x, &u, 8); return x; }
static void __threadfence() {}
static unsigned atomicAdd(unsigned* to, unsigned value) {
  const unsigned old = *to;
  *to = old + value;
  return old;
}

"""

LAUNCH = """
}  // namespace emitted

static const uint64_t* argument;

extern "C" void launch(int64_t phase, int64_t blocks, const uint64_t* arguments, int64_t reversed,
                       int64_t* counts) {
  argument = arguments;
  switch (phase) {
    ENTRIES
    default: std::abort();
  }
  shim::gridDim.x = unsigned(blocks);
  shim::num_wide = shim::num_misaligned = shim::num_split_barriers = 0;
  for (int64_t b = 0; b < blocks; b++) {
    shim::blockIdx.x = unsigned(reversed ? blocks - 1 - b : b);
    shim::run_block(reversed);
  }
  counts[0] = shim::num_wide;
  counts[1] = shim::num_misaligned;
  counts[2] = shim::num_split_barriers;
}
"""


def host_source(source: str) -> str:
    """Return a C++ source that runs the CUDA text ``source``; it exports ``launch``."""
    types = [kind for kind, _, _ in FIELDS] + ["long long"]
    values = ", ".join(
        f"(emitted::{kind})argument[{k}]" if "int64_t" in kind else f"({kind})argument[{k}]"
        for k, kind in enumerate(types)
    )
    values = values.replace("emitted::const int64_t*", "const emitted::int64_t*")
    phases = sorted({int(number) for number in re.findall(r"phase_(\d+)\(", source)})
    entries = "\n".join(
        f"case {p}: shim::body = [] {{ emitted::phase_{p}({values}); }}; break;" for p in phases
    )
    head = BUILT_IN.replace("THREADS_OF_A_BLOCK", str(THREADS))
    return head + source + LAUNCH.replace("ENTRIES", entries)


@dataclass
class HostModule:
    """CUDA text compiled for the host. ``reverse`` runs blocks and threads backwards."""

    source: str
    cached: bool = False
    reverse: bool = False
    num_launches: int = 0
    num_wide: int = 0
    _launch: Any = None

    def launch(self, name: str, blocks: int, arguments: Sequence[int]) -> None:
        if self._launch is None:
            self._launch = build_library(host_source(self.source)).library.launch
        counts, items = (ctypes.c_int64 * 3)(), (ctypes.c_uint64 * len(arguments))(*arguments)
        phase = int(name.removeprefix("phase_"))
        self._launch(
            ctypes.c_int64(phase), ctypes.c_int64(blocks), items, int(self.reverse), counts
        )
        self.num_launches += 1
        self.num_wide += counts[0]
        assert counts[1] == 0, f"{counts[1]} accesses are not aligned"
        assert counts[2] == 0, f"{counts[2]} threads miss a barrier that others wait at"


@dataclass
class HostReading:
    """Numbers that arrive when the machine has been asked often enough."""

    values: torch.Tensor
    asks_left: int

    def has_arrived(self) -> bool:
        self.asks_left -= 1
        return self.asks_left < 0


@dataclass
class HostMachine:
    """The host in the part of a CUDA device.

    Attributes:
        scalars_on_host: whether 0-dim tensors count as host memory, as step counts are by default.
        rewrite: changes the text before it is compiled; for faults that must be caught.
        modules: what was loaded, by source.
        lateness: how often one asks for numbers in vain before they are there.
        num_waits: how often the host was allowed to wait.
    """

    scalars_on_host: bool = True
    reverse: bool = False
    rewrite: Any = None
    capturing: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    modules: dict[str, HostModule] = field(default_factory=dict)
    num_uploads: int = 0
    lateness: int = 0
    num_waits: int = 0

    def load(self, source: str, cache_dir: Path | None) -> HostModule:
        if source not in self.modules:
            text = source if self.rewrite is None else self.rewrite(source)
            self.modules[source] = HostModule(text, reverse=self.reverse)
        return self.modules[source]

    def on_host(self, tensor: torch.Tensor) -> bool:
        return self.scalars_on_host and tensor.dim() == 0

    def is_capturing(self) -> bool:
        return self.capturing

    def staged(self, data: torch.Tensor) -> torch.Tensor:
        self.num_uploads += 1
        return data.clone()

    def keep_for_stream(self, tensors: Sequence[torch.Tensor]) -> None:
        assert all(tensor.device == self.device for tensor in tensors)

    def read_later(self, tensor: torch.Tensor) -> HostReading:
        return HostReading(tensor.clone(), self.lateness)

    def waiting(self) -> Any:
        self.num_waits += 1
        return contextlib.nullcontext()

    @property
    def num_launches(self) -> int:
        """How many kernels were launched so far."""
        return sum(module.num_launches for module in self.modules.values())
