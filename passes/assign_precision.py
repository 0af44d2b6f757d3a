"""Decide for every floating node how it computes and stores, and write down why.

One walk in graph order carries a state for each value: 16-bit, fp32, or weak. Weak are parameters
and constants: beside 16-bit data they do not raise the result to fp32, as TensorFlow's grappler
paints ops that lie between matrix products; so a scale or a mask does not make a chain bounce. What
leads into an fp32 op is not rounded on the way there: probabilities before a logarithm, an offset
before a variance. Weakest to strongest, the op's rule, the user's pins, the user's overrides and
the kernels at hand decide. Backward nodes follow the forward node whose gradient they compute.

The graph is only annotated: ``insert-casts`` makes it real.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from mpcompile.graph import decisions, nodes
from mpcompile.graph.half_range import out_of_range
from mpcompile.graph.kernels import has_half_kernel
from mpcompile.graph.links import Links, find_links
from mpcompile.graph.overrides import Override, build_overrides, find_override
from mpcompile.graph.pins import Pin, PinScope, pin_of
from mpcompile.graph.roles import GraphKind
from mpcompile.pass_base import GraphPass, PassContext, Stage
from mpcompile.precision import Decision, Entry, Precision, Rule, Table


@dataclass(frozen=True)
class AssignPrecision(GraphPass):
    """Write a ``Decision`` on every node that computes fp32 values.

    Requires: functional ATen graph with ``meta["val"]`` on every node.
    Ensures: the graph is unchanged; nodes that touch no fp32 tensor carry no decision.
    """

    name: ClassVar[str] = "assign-precision"
    stage: ClassVar[Stage] = Stage.ATEN
    exact: ClassVar[bool] = True
    off: ClassVar[str] = "no casts at all"

    def run(self, gm: GraphModule, ctx: PassContext) -> int:
        """Annotate ``gm`` and return the number of nodes that are to store 16 bits."""
        assert ctx.roles is not None
        if ctx.half is torch.float32 or ctx.roles.kind is GraphKind.UPDATE:
            return 0
        painter = _Painter(
            ctx,
            build_overrides(ctx.config.keep_fp32, ctx.config.keep_half),
            find_links(gm.graph),
            out_of_range(gm.graph, ctx.table) if _has_small_range(ctx) else {},
        )
        for node in gm.graph.nodes:
            painter.paint(node)
        return sum(decision.precision.stores_half for decision in painter.decided.values())


def _has_small_range(ctx: PassContext) -> bool:
    """Whether constants are looked at; autocast's tables do what autocast does."""
    return ctx.half is torch.float16 and ctx.table.ruled_backward


class _State(enum.Enum):
    """What a value will be when an op reads it."""

    HALF = "half"
    FP32 = "fp32"
    WEAK = "weak"


_CONSTANTS = frozenset(
    f"aten.{op}"
    for op in """full zeros ones full_like zeros_like ones_like new_full new_zeros new_ones empty
    new_empty scalar_tensor empty_like empty_strided new_empty_strided arange""".split()
)


@dataclass
class _Painter:
    """The walk: decides node by node, knowing the state of everything before."""

    ctx: PassContext
    overrides: tuple[Override, ...]
    links: Links
    unfit: dict[Node, str]
    states: dict[Node, _State] = field(default_factory=dict)
    decided: dict[Node, Decision] = field(default_factory=dict)
    feeding: dict[Node, Node | None] = field(default_factory=dict)

    @property
    def table(self) -> Table:
        return self.ctx.table

    def paint(self, node: Node) -> None:
        """Decide for ``node`` and note the state of what it gives."""
        if node.op in ("placeholder", "get_attr"):
            self.states[node] = self._input_state(node)
        if node.op != "call_function":
            return
        if nodes.is_getitem(node):
            self._paint_getitem(node)
        elif self._is_eligible(node):
            self._decide(node)
        elif nodes.is_half(node):
            self.states[node] = _State.HALF  # written as 16-bit by the user

    def _input_state(self, node: Node) -> _State:
        val = nodes.value(node)
        if isinstance(val, Tensor) and val.dim() == 0:
            return _State.WEAK
        assert self.ctx.roles is not None
        weak = self.table.weak_parameters and self.ctx.roles.is_parameter(node)
        return _State.WEAK if weak else _State.FP32

    def _is_eligible(self, node: Node) -> bool:
        """An op that gives fp32 and no other floating dtype: those are as the user wrote them."""
        if not isinstance(node.target, OpOverload):
            return False
        results = nodes.tensor_values(node)
        floats = {val.dtype for val in results if val.is_floating_point() or val.is_complex()}
        return floats == {torch.float32}

    def _paint_getitem(self, node: Node) -> None:
        source = node.args[0]
        assert isinstance(source, Node)
        if not nodes.is_f32(node):
            return
        decision = decisions.get(source)
        half = decision is not None and node.args[1] in decisions.half_results(
            source, decision.precision, self.ctx.half, self._entry(source)
        )
        self.states[node] = _State.HALF if half else _State.FP32
        if decision is not None:
            precision = decision.precision if half else Precision.FP32
            self._note(node, Decision(precision, decision.reason))

    def _note(self, node: Node, decision: Decision) -> None:
        decisions.put(node, decision)
        self.decided[node] = decision

    def _decide(self, node: Node) -> None:
        decision = self._supported(node, self._given(node) or self._ruled(node))
        numbers = all(tensor.dim() == 0 for tensor in nodes.tensor_values(node))
        if numbers and decision.precision.stores_half and self.table.ruled_backward:
            decision = Decision(Precision.FP32, "a single number: nothing to win in 16 bits")
        self._note(node, decision)
        self.states[node] = self._result_state(node, decision.precision)

    def _result_state(self, node: Node, precision: Precision) -> _State:
        if precision.stores_half:
            return _State.HALF
        if node in self.unfit:
            return _State.FP32
        val = nodes.value(node)
        scalar = isinstance(val, Tensor) and val.dim() == 0
        moved = self._entry(node).rule is Rule.MOVE
        if scalar or (moved and self._first_state(node) is _State.WEAK):
            return _State.WEAK
        constant = self.table.weak_parameters and nodes.op_name(node) in _CONSTANTS
        return _State.WEAK if constant else _State.FP32

    def _entry(self, node: Node) -> Entry:
        return self.table.entry(nodes.op_name(node))

    # --- who decides: override, pin, rule --------------------------------------------------------

    def _given(self, node: Node) -> Decision | None:
        """Return what is decided before the table is asked."""
        given = self._overridden(node) or self._pinned(node)
        unfit = self.unfit.get(node)
        return given or (Decision(Precision.FP32, unfit) if unfit else None)

    def _overridden(self, node: Node) -> Decision | None:
        given = self.ctx.assigned.get(node.name)
        if given is not None:
            return Decision(Precision(given), "assignment read from file")
        if node in self.links.sums:
            return None
        entry = find_override(self.overrides, node, self.links.origin(node))
        if entry is None:
            return None
        self.ctx.used_overrides.add(entry.pattern)
        if self._entry(node).rule is Rule.MOVE:
            return None
        option = "keep_fp32" if entry.precision is Precision.FP32 else "keep_half"
        return Decision(entry.precision, f"{option}={entry.pattern!r}")

    def _pinned(self, node: Node) -> Decision | None:
        pin = pin_of(node)
        entry = self._entry(node)
        if pin is None or entry.rule is Rule.MOVE or node in self.links.sums:
            return None
        if pin.scope in (PinScope.OWN_CAST, PinScope.PARTS):
            return self._inside_attention(node, pin)
        if nodes.is_backward(node) and not self.table.ruled_backward:
            return None
        if pin.scope is PinScope.OPERANDS and not self.table.keeps_products:
            return None
        if pin.scope is PinScope.COMPOSITE:
            composite = self.table.composites.get(pin.why)
            if composite is None:
                return None
            return Decision(Precision.FP32, f"part of {pin.why} ({composite.source})")
        if pin.scope is PinScope.READER and entry.rule is Rule.HALF:
            return None
        return Decision(Precision.FP32, pin.why)

    def _inside_attention(self, node: Node, pin: Pin) -> Decision | None:
        """Casts in and around attention are dropped; autocast keeps those that its parts make."""
        if pin.scope is PinScope.OWN_CAST or self.table.keeps_products:
            return Decision(Precision.HALF, pin.why) if nodes.is_cast(node) else None
        return self._promote(node, "autocast does not look inside attention")

    def _ruled(self, node: Node) -> Decision:
        entry = self._entry(node)
        forward = self.links.forward.get(node)
        if entry.rule is Rule.MOVE:
            return self._follow_first(node)
        if nodes.is_backward(node) and not self.table.ruled_backward:
            return self._follow_autograd(node, forward)
        if entry.rule is Rule.HALF:
            return Decision(Precision.HALF, entry.source)
        if entry.rule is Rule.FP32:
            return Decision(Precision.FP32, entry.source)
        if entry.rule is Rule.PROMOTE:
            return self._promote(node, entry.source)
        if entry.rule is Rule.RANDOM:
            return self._keep_stored(node, entry)
        if forward is not None and self._entry(forward).rule is not Rule.MOVE:
            return self._follow_forward(node, forward)
        if entry.rule is Rule.MIXED:
            return self._keep_stored(node, entry)
        return self._paint_neutral(node, entry)

    # --- how the rules read the states -----------------------------------------------------------

    def _strong(self, node: Node) -> list[Node]:
        """Inputs that have a say: fp32 tensors of at least one dimension that are not weak."""
        return [
            arg
            for arg in nodes.input_nodes(node)
            if self.states.get(arg, _State.WEAK) is not _State.WEAK and not decisions.is_number(arg)
        ]

    def _first_state(self, node: Node) -> _State:
        inputs = nodes.input_nodes(node)
        return self.states.get(inputs[0], _State.FP32) if inputs else _State.FP32

    def _follow_first(self, node: Node) -> Decision:
        half = self._first_state(node) is _State.HALF
        inputs = nodes.input_nodes(node)
        follows = f"follows %{inputs[0].name}" if inputs else "no input"
        return Decision(Precision.HALF if half else Precision.FP32, follows)

    def _keep_stored(self, node: Node, entry: Entry) -> Decision:
        """Compute in fp32, store as the first input is stored."""
        if not nodes.input_nodes(node) or self._first_state(node) is not _State.HALF:
            return Decision(Precision.FP32, entry.source)
        if self.table.ruled_backward and (sink := self._fp32_reader(node)) is not None:
            return Decision(Precision.FP32, f"{entry.source}, leads to fp32 %{sink.name}")
        as_autocast = entry.rule is Rule.MIXED and not self.table.ruled_backward
        return Decision(Precision.HALF if as_autocast else Precision.FP32_HALF, entry.source)

    def _follow_forward(self, node: Node, forward: Node) -> Decision:
        decision = decisions.get(forward)
        if decision is None or not decision.precision.stores_half:
            reason = decision.reason if decision else "as written"
            return Decision(Precision.FP32, f"gradient of %{forward.name} ({reason})")
        reason = f"gradient of %{forward.name}"
        if not decision.precision.computes_half or not self._is_all_half(node):
            return Decision(Precision.FP32_HALF, f"{reason}, reads fp32 values")
        return Decision(Precision.HALF, reason)

    def _follow_autograd(self, node: Node, forward: Node | None) -> Decision:
        """Autocast leaves backward alone: a gradient has the dtype of the value it belongs to."""
        targets = self.links.gradient_of(node)
        stores_half = bool(targets) and all(
            self.states.get(target) is _State.HALF for target in targets
        )
        reason = f"gradient of %{targets[0].name}" if targets else "gradient"
        given = decisions.get(forward) if forward is not None else None
        if given is not None:
            computes_half = given.precision.computes_half
        else:
            computes_half = self._is_all_half(node) and (stores_half or not targets)
        if computes_half:
            return Decision(Precision.HALF, reason)
        return Decision(Precision.FP32_HALF if stores_half else Precision.FP32, reason)

    def _is_all_half(self, node: Node) -> bool:
        return all(
            self.states.get(arg, _State.HALF) is _State.HALF
            for arg in nodes.input_nodes(node)
            if not decisions.is_number(arg)
        )

    def _promote(self, node: Node, source: str) -> Decision:
        known = [arg for arg in nodes.input_nodes(node) if arg in self.states]
        floats = [arg for arg in known if not decisions.is_number(arg)] or known
        wide = [arg for arg in floats if self.states[arg] is not _State.HALF]
        if wide or not floats:
            reads = f"reads fp32 %{wide[0].name}" if wide else "reads no 16-bit value"
            return Decision(Precision.FP32, f"{source}, {reads}")
        return Decision(Precision.HALF, f"{source}, all inputs are 16-bit")

    def _paint_neutral(self, node: Node, entry: Entry) -> Decision:
        strong = self._strong(node)
        wide = [arg for arg in strong if self.states[arg] is _State.FP32]
        if wide:
            return Decision(Precision.FP32, f"neutral, reads fp32 %{wide[0].name}")
        if not strong:
            return Decision(Precision.FP32, "neutral, reads no 16-bit value")
        all_half = self._is_all_half(node)
        rounds = entry.rule is Rule.NEUTRAL or not all_half
        if rounds and (sink := self._fp32_reader(node)) is not None:
            return Decision(Precision.FP32, f"neutral, leads to fp32 %{sink.name}")
        if all_half:
            return Decision(Precision.HALF, f"neutral, follows %{strong[0].name}")
        return Decision(
            Precision.FP32_HALF, f"neutral, %{strong[0].name} meets a parameter or constant"
        )

    def _fp32_reader(self, node: Node) -> Node | None:
        """Return an fp32 op that ``node``'s value reaches in forward with nothing 16-bit between.

        The search follows data movement and ops of one input, and ends where values join. It keeps
        its own stack: a chain may be longer than Python's.
        """
        pending = [node]
        while pending:
            here = pending[-1]
            ahead = [
                reader
                for reader in here.users
                if reader not in self.feeding and self._passes_on(reader)
            ]
            if not ahead:
                sinks = (self._fp32_sink(reader) for reader in here.users)
                self.feeding[here] = next((sink for sink in sinks if sink is not None), None)
                pending.pop()
            pending += ahead
        return self.feeding[node]

    def _fp32_sink(self, reader: Node) -> Node | None:
        if reader.op == "output":
            return reader
        if self._passes_on(reader):
            return self.feeding[reader]
        if nodes.is_backward(reader) or not self._is_eligible(reader):
            return None
        choice = self._given(reader)
        if choice is not None:
            return None if choice.precision.computes_half else reader
        return reader if self._entry(reader).rule is Rule.FP32 else None

    def _passes_on(self, reader: Node) -> bool:
        """Whether what ``reader`` gives is what it reads, moved or bent."""
        if reader.op != "call_function" or nodes.is_backward(reader):
            return False
        if nodes.is_getitem(reader):  # data comes first, statistics and masks behind it
            source = reader.args[0]
            assert isinstance(source, Node)
            return bool(reader.args[1] == 0) or self._entry(source).rule is Rule.MOVE
        rule = self._entry(reader).rule
        return (
            rule in (Rule.MOVE, Rule.NEUTRAL, Rule.EXACT, Rule.RANDOM)
            and self._is_eligible(reader)
            and self._given(reader) is None
            and self._has_one_input(reader)
        )

    def _has_one_input(self, node: Node) -> bool:
        """Whether parameters, constants and numbers are all that stands beside one input."""
        joined = [
            arg
            for arg in dict.fromkeys(nodes.input_nodes(node))
            if nodes.is_f32(arg)
            and not decisions.is_number(arg)
            and self.states.get(arg) is not _State.WEAK
            and nodes.op_name(arg) not in _CONSTANTS
        ]
        return len(joined) <= 1

    # --- what the kernels allow ------------------------------------------------------------------

    def _supported(self, node: Node, decision: Decision) -> Decision:
        entry = self._entry(node)
        unasked = entry.rule in (Rule.MOVE, Rule.RANDOM, Rule.MIXED) or nodes.is_cast(node)
        if not decision.precision.computes_half or unasked:
            return decision
        support = has_half_kernel(node, self.ctx.half)
        if not support.ok:
            return Decision(Precision.FP32, f"no {self.ctx.half} kernel ({support.reason})")
        if not decisions.half_results(node, decision.precision, self.ctx.half, entry):
            return Decision(Precision.FP32, f"its result stays fp32 for {self.ctx.half} inputs")
        return decision
