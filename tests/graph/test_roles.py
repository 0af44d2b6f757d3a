"""Roles of inputs, outputs and whole graphs, as Dynamo and AOTAutograd name them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpcompile.graph import nodes
from mpcompile.graph.roles import GraphKind, InputRole, OutputRole, is_visible_reader
from tests.graph.trace import Recorder, find, record


def kinds(recorder: Recorder) -> list[GraphKind]:
    return [roles.kind for roles in recorder.roles]


def counted(recorder: Recorder, index: int) -> dict[str, int]:
    """Number of inputs by role in one graph."""
    roles = [role.name for role in recorder.roles[index].inputs.values()]
    return {name: roles.count(name) for name in sorted(set(roles))}


def test_training_graph_has_parameters_buffers_data_and_tangents() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss

    recorder = record(step, torch.ones(3, 4))
    assert kinds(recorder) == [GraphKind.TRAINING]
    assert counted(recorder, 0) == {"BUFFER": 3, "DATA": 1, "PARAMETER": 4, "TANGENT": 1}
    values = recorder.graphs[0].output_node().args[0]
    assert isinstance(values, (list, tuple))
    outputs = [
        role
        for value, role in zip(values, recorder.roles[0].outputs, strict=True)
        if value is not None
    ]
    assert outputs == [OutputRole.VALUE, *[OutputRole.GRADIENT] * 4]
    assert {recorder.roles[0].inputs[node] for node in recorder.roles[0].mutated} == {
        InputRole.BUFFER
    }


def test_parameters_are_told_from_data_that_requires_grad() -> None:
    weight = nn.Parameter(torch.ones(3))
    recorder = record(lambda x: (x * weight).sum(), torch.ones(3, requires_grad=True))
    roles = recorder.roles[0]
    assert counted(recorder, 0) == {"DATA": 1, "PARAMETER": 1, "TANGENT": 1}
    (parameter,) = (node for node in roles.inputs if roles.is_parameter(node))
    assert nodes.op_name(next(iter(parameter.users))) == "aten.mul"


def test_tied_weight_is_one_parameter() -> None:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    recorder = record(lambda x: head(embedding(x)).sum(), torch.zeros(3, dtype=torch.long))
    assert counted(recorder, 0)["PARAMETER"] == 1


def test_clip_graph_reads_gradients_and_is_an_update() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_([weight], 1.0)

    recorder = record(clip)
    assert kinds(recorder) == [GraphKind.UPDATE]
    assert counted(recorder, 0) == {"GRADIENT": 1}


def test_optimizer_graph_is_an_update() -> None:
    model = nn.Linear(3, 3)
    opt = torch.optim.AdamW(model.parameters())

    def update() -> None:
        opt.step()

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    update()
    recorder = record(update)
    roles = set(recorder.roles[0].inputs.values())
    assert kinds(recorder) == [GraphKind.UPDATE]
    assert InputRole.PARAMETER in roles
    assert InputRole.STATE in roles


def test_average_of_weights_is_an_update() -> None:
    model, average = nn.Linear(3, 3), nn.Linear(3, 3)

    @torch.no_grad()
    def update() -> None:
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)

    assert kinds(record(update)) == [GraphKind.UPDATE]


def test_evaluation_is_inference() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).eval()
    with torch.no_grad():
        recorder = record(lambda x: model(x), torch.ones(3, 4))
    assert kinds(recorder) == [GraphKind.INFERENCE]
    assert counted(recorder, 0)["PARAMETER"] == 4


def test_batch_norm_in_training_mode_without_grad_is_inference() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    with torch.no_grad():
        recorder = record(lambda x: model(x), torch.ones(3, 4))
    assert kinds(recorder) == [GraphKind.INFERENCE]
    assert len(recorder.roles[0].mutated) == 3


def test_detach_is_inference() -> None:
    assert kinds(record(lambda x: x.detach(), torch.ones(3))) == [GraphKind.INFERENCE]


def test_module_state_written_in_forward_without_grad_is_inference() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.count: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x * 2

    model = Counter()
    with torch.no_grad():
        recorder = record(lambda x: model(x), torch.ones(3))
    assert kinds(recorder) == [GraphKind.INFERENCE]
    assert model.count == 1


def test_data_written_in_place_without_grad_is_an_update() -> None:
    assert kinds(record(lambda x: x.mul_(2), torch.ones(3))) == [GraphKind.UPDATE]


def test_writes_and_outputs_are_visible_readers() -> None:
    graph = record(lambda x: x.mul_(2), torch.ones(3)).graphs[0]
    (write,) = find(graph, "aten.copy_")
    (multiply,) = find(graph, "aten.mul")
    assert is_visible_reader(write)
    assert is_visible_reader(graph.output_node())
    assert not is_visible_reader(multiply)
