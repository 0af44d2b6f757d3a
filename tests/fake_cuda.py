"""Fake CUDA tensors on a machine without CUDA, as far as graphs need them.

Without a card, torch has no device guard for CUDA, without which fake CUDA tensors cannot require
grad, and no choice of attention kernels. Both are registered here by a small library: a guard that
does nothing, and the choice that ``ATen/native/transformers/cuda/sdp_utils.cpp`` makes by dtype on
a card that has both kernels (flash takes 16 bits only). Private torch API, seen in 2.11 to 2.14:
``_fused_sdp_choice_stub``, ``C10_REGISTER_GUARD_IMPL``.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_map_only

from mpcompile.codegen.host_compiler import find_host_compiler

LIBRARY = """
#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

static int64_t choose(const at::Tensor& query, const at::Tensor&, const at::Tensor&,
                      const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  const auto dtype = query.scalar_type();
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  return static_cast<int64_t>(is_half ? at::SDPBackend::flash_attention
                                      : at::SDPBackend::efficient_attention);
}

using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

extern "C" void install() {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
}
"""


@functools.cache
def install(folder: Path) -> None:
    """Build and load the library, unless there is a CUDA device; once in a process."""
    if torch.cuda.is_available():
        return
    root = Path(torch.__file__).parent
    source, library = folder / "fake_cuda.cpp", folder / "fake_cuda.so"
    source.write_text(LIBRARY)
    compiler = find_host_compiler().path
    flags = ["-std=c++20", "-shared", "-fPIC", "-w", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
    command = [compiler, *flags, str(source), "-o", str(library), "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True, capture_output=True)
    ctypes.CDLL(str(library)).install()


def moved_to_cuda(gm: GraphModule) -> GraphModule:
    """Make ``gm`` the graph of CUDA tensors: its values, and the devices that it names."""
    cuda = torch.device("cuda", 0)
    for node in gm.graph.nodes:
        moved = tree_map_only(torch.device, lambda _: cuda, (node.args, node.kwargs))
        node.args, node.kwargs = moved
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=cuda)

    with mode, torch.no_grad():
        inputs = [placed(node.meta["val"]) for node in gm.graph.find_nodes(op="placeholder")]
        _Writer(gm).run(*inputs, enable_io_processing=False)
    gm.recompile()
    return gm


class _Writer(Interpreter):
    """Runs a graph on fake tensors and notes what each node gives."""

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            n.meta["val"] = value
        return value
