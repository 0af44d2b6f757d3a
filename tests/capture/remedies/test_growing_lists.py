from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpcompile.backend import last_report
from mpcompile.capture.remedies import growing_lists
from tests.capture.remedies.whole_steps import breaks_of, compile_whole

NUM_CALLS = 6

in_globals: list[Any] = []


class Trainer:
    """What a step appends to, in several places; ``log`` says how."""

    def __init__(self, log: Callable[[Trainer, Tensor], Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.log = log
        self.history: list[Any] = []
        self.alias = self.history
        self.recent: collections.deque[Any] = collections.deque()
        self.by_name: dict[str, list[Any]] = {"loss": []}
        self.by_default: dict[str, list[Any]] = collections.defaultdict(list)
        in_globals.clear()

    def step(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        found = self.log(self, loss)
        self.opt.step()
        self.opt.zero_grad()
        result: Tensor = loss.detach() + (0 if found is None else found)
        return result

    def content(self) -> list[Any]:
        """Return what all lists hold, their elements' types included."""
        lists = [self.history, self.recent, self.by_name, dict(self.by_default), in_globals]
        return [plain(item) for item in lists]


def plain(item: Any) -> Any:
    """Return values and types, tensors as the bits that they hold."""
    if isinstance(item, Tensor):
        return ("tensor", item.dtype, item.tolist())
    if isinstance(item, dict):
        return {key: plain(value) for key, value in item.items()}
    if isinstance(item, (list, tuple, collections.deque)):
        return (type(item), [plain(value) for value in item])
    return (type(item), item)


def run(step: Callable[[Tensor], Tensor], num_calls: int = NUM_CALLS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [step(torch.randn(3, 4, generator=generator)) for _ in range(num_calls)]


def check(
    log: Callable[[Trainer, Tensor], Any], num_graphs: int, num_calls: int = NUM_CALLS
) -> Trainer:
    """Assert that the step gives what eager does and was compiled ``num_graphs`` times."""
    eager = Trainer(log)
    expected, expected_content = run(eager.step, num_calls), eager.content()
    trainer = Trainer(log)
    compiled = compile_whole(trainer.step)
    found = run(compiled, num_calls)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(trainer.model.state_dict(), eager.model.state_dict(), rtol=0, atol=0)
    assert trainer.content() == expected_content
    assert breaks_of(compiled) == []
    assert len(last_report(compiled).whole) == num_graphs
    return trainer


def log_tensor(self: Trainer, loss: Tensor) -> None:
    self.history.append(loss.detach())


def log_global(self: Trainer, loss: Tensor) -> None:
    in_globals.append(loss.detach())


def log_deque(self: Trainer, loss: Tensor) -> None:
    self.recent.append(loss.detach())


def log_in_dict(self: Trainer, loss: Tensor) -> None:
    self.by_name["loss"].append(loss.detach())
    self.by_name.get("loss", []).append(1)


def log_numbers(self: Trainer, loss: Tensor) -> None:
    self.history.append(loss.item())
    self.history.append(loss.item() * 2)
    self.history.append(loss.shape)
    self.history.append("logged")


def log_tuple(self: Trainer, loss: Tensor) -> None:
    self.history.append((loss.detach(), loss.item(), (3, None)))


def log_record(self: Trainer, loss: Tensor) -> None:
    record: dict[str, Any] = {"loss": loss.item(), "norms": [self.model.weight.detach().norm()]}
    self.history.append(record)
    in_globals.append(record)
    record["late"] = loss.detach()


def log_clipped_norm(self: Trainer, loss: Tensor) -> None:
    self.history.append(nn.utils.clip_grad_norm_(self.model.parameters(), 0.1))


def log_gradient(self: Trainer, loss: Tensor) -> None:
    self.history.append(self.model.weight.grad)


def log_in_order(self: Trainer, loss: Tensor) -> None:
    for position in range(3):
        self.history.append((position, loss * position))
        in_globals.append(position)
    self.history.append("last")


def log_by_two_names(self: Trainer, loss: Tensor) -> None:
    self.history.append("first")
    self.alias.append(loss.detach())
    self.history.append("last")


def log_with_a_method_kept(self: Trainer, loss: Tensor) -> None:
    append = self.history.append
    append(loss.detach())
    assert list(map(append, (1, 2))) == [None, None]


def log_from_except(self: Trainer, loss: Tensor) -> None:
    try:
        self.history.append("try")
        raise ValueError
    except ValueError:
        self.history.append(loss.detach())


APPENDS = [value for name, value in list(globals().items()) if name.startswith("log_")]


@pytest.mark.parametrize("log", APPENDS, ids=lambda log: log.__name__)
def test_step_that_only_appends_is_compiled_once(log: Callable[[Trainer, Tensor], None]) -> None:
    check(log, num_graphs=1)


def test_list_in_a_closure_and_as_argument_is_not_looked_at() -> None:
    trainer = Trainer(lambda *_: None)
    losses: list[Tensor] = []

    def step(x: Tensor, given: list[Any]) -> Tensor:
        loss = trainer.step(x)
        losses.append(loss)
        given.append(loss)
        return loss

    compiled = compile_whole(step)
    given: list[Any] = []
    found = run(lambda x: compiled(x, given))
    assert len(last_report(compiled).whole) == 1
    assert all(a is b is c for a, b, c in zip(found, losses, given, strict=True))
    assert len(losses) == len(given) == NUM_CALLS


def test_list_of_a_default_dict_is_compiled_without_and_with_its_key() -> None:
    check(lambda self, loss: self.by_default["loss"].append(loss.detach()), num_graphs=2)


def test_item_that_requires_grad_is_detached_as_a_returned_one_is() -> None:
    def log(self: Trainer, loss: Tensor) -> None:
        self.history.append(loss)

    assert not any(item.requires_grad for item in check(log, num_graphs=1).history)


def test_list_that_is_replaced_by_another_gets_the_next_items() -> None:
    trainer = Trainer(log_tensor)
    compiled = compile_whole(trainer.step)
    run(compiled)
    before, trainer.history = trainer.history, []
    run(compiled)
    assert len(before) == len(trainer.history) == NUM_CALLS
    assert len(last_report(compiled).whole) == 1


def test_list_that_becomes_another_type_is_compiled_anew() -> None:
    trainer = Trainer(log_tensor)
    compiled = compile_whole(trainer.step)
    run(compiled)
    trainer.history = collections.deque(maxlen=2)  # type: ignore[assignment]
    run(compiled)
    assert len(trainer.history) == 2
    assert len(last_report(compiled).whole) == 2


def read_length_before(self: Trainer, loss: Tensor) -> int:
    num = len(self.history)
    self.history.append(loss.detach())
    return num


def read_length_after(self: Trainer, loss: Tensor) -> int:
    self.history.append(loss.detach())
    self.history.append(len(self.history))
    return len(self.history)


def read_length_of_alias(self: Trainer, loss: Tensor) -> int:
    self.history.append(loss.detach())
    return len(self.alias)


def read_last(self: Trainer, loss: Tensor) -> Any:
    self.history.append(loss.detach())
    return self.history[-1]


def read_all(self: Trainer, loss: Tensor) -> Any:
    self.history.append(loss.detach())
    return sum(self.alias)


def read_through_attributes(self: Trainer, loss: Tensor) -> Any:
    self.history.append(loss.detach())
    return len(vars(self)["alias"])


def read_in_item(self: Trainer, loss: Tensor) -> Any:
    self.history.append((loss.detach(), len(self.alias)))


def extend_after(self: Trainer, loss: Tensor) -> None:
    self.history.append(loss.detach())
    self.alias.extend([1, 2])


def pop_between(self: Trainer, loss: Tensor) -> Any:
    self.history.append(loss.detach())
    self.history.append("gone")
    assert self.history.pop() == "gone"
    self.history.append("kept")


def read_deque(self: Trainer, loss: Tensor) -> Any:
    self.recent.append(loss.detach())
    return sum(self.recent)


READS = [
    value
    for name, value in list(globals().items())
    if name.startswith(("read_", "extend_", "pop_"))
]


@pytest.mark.parametrize("log", READS, ids=lambda log: log.__name__)
def test_step_that_looks_at_the_list_is_right(log: Callable[[Trainer, Tensor], Any]) -> None:
    check(log, num_graphs=3, num_calls=3)


def test_list_made_in_the_step_is_dynamos() -> None:
    def log(self: Trainer, loss: Tensor) -> int:
        made: list[Any] = []
        made.append(loss.detach())
        return len(made)

    check(log, num_graphs=1)


def test_list_that_is_replaced_in_the_step_keeps_its_items() -> None:
    def log(self: Trainer, loss: Tensor) -> None:
        old = self.history
        old.append(loss.detach())
        self.history = []
        self.history.append("new")
        old.append("old")
        self.by_name["loss"] = old

    check(log, num_graphs=2)  # the second call finds a list by two names


def test_object_of_the_users_is_appended() -> None:
    class Record:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    def log(self: Trainer, loss: Tensor) -> None:
        self.history.append(Record(loss.detach()))

    trainer = Trainer(log)
    losses = run(compile_whole(trainer.step))
    assert [record.loss for record in trainer.history] == losses


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_append_in_a_checkpointed_function_breaks_the_graph() -> None:
    def log(self: Trainer, loss: Tensor) -> None:
        checkpoint(lambda x: self.history.append(x * 2), loss.detach(), use_reentrant=False)

    eager, trainer = Trainer(log), Trainer(log)
    compiled = compile_whole(trainer.step)
    torch.testing.assert_close(run(compiled, 3), run(eager.step, 3), rtol=0, atol=0)
    assert trainer.content() == eager.content()
    assert any("side effect" in reason for reason in breaks_of(compiled))


def test_append_before_a_break_comes_before_what_follows() -> None:
    def log(self: Trainer, loss: Tensor) -> int:
        self.history.append(loss.detach())
        torch._dynamo.graph_break()
        self.history.append("after")
        return len(self.alias)

    eager, trainer = Trainer(log), Trainer(log)
    compiled = compile_whole(trainer.step)
    torch.testing.assert_close(run(compiled, 3), run(eager.step, 3), rtol=0, atol=0)
    assert trainer.content() == eager.content()


@pytest.mark.parametrize("log", [log_tensor, log_deque], ids=["list", "deque"])
def test_replay_of_each_step_leaves_no_double_entries(log: Any) -> None:
    trainer = Trainer(log)
    compiled = torch.compile(
        trainer.step, backend="mpcompile", options={"lowering": "eager", "check": "always"}
    )
    losses = run(compiled, num_calls=3)
    assert last_report(compiled).replayed == 3
    assert [*trainer.history, *trainer.recent] == losses


def test_each_call_compiles_without_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_lists, "is_traced_whole", lambda: False)
    check(log_tensor, num_graphs=3, num_calls=3)
