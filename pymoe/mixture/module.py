"""MixtureOfExpertBackends: a gate over served experts, some of which may be slow or dead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pymoe.autograd.compiler_disable import compiler_disable
from pymoe.mixture.choice import Choice, choose, gather_rows, mix, weigh
from pymoe.mixture.counts import BackendStats
from pymoe.mixture.errors import TooFewAnswersError
from pymoe.mixture.fallback import Fallback, check_fallback, fall_back
from pymoe.mixture.fan_out import ExpertRequest
from pymoe.mixture.gate import SlotGate
from pymoe.mixture.node import ExpertsNode, ForwardRecord
from pymoe.mixture.options import NAME, check_options, check_schemas
from pymoe.mixture.rest import awake
from pymoe.mixture.rules import Rules
from pymoe.mixture.slots import Slots
from pymoe.mixture.used import UsedAnswer, use_answers
from pymoe.nn.losses import AuxiliaryLosses
from pymoe.reference.checks import FLOATING
from pymoe.reference.types import Gate, RouterLosses
from pymoe.runtime.backend import ExpertBackend
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.gradients import all_finite
from pymoe.runtime.nested import nested_pack
from pymoe.runtime.schema import RequestSchema, tensor_protos


class MixtureOfExpertBackends(nn.Module):
    """Every row asks the ``top_k`` experts that its gate likes best, through their backends' pools.

    ``mixture(*args, **kwargs)`` takes and returns what one of the experts does. The gate looks at the first tensor;
    each expert is asked for its own rows alone, all experts at once; a row's output is the sum of its experts' outputs,
    weighted by the softmax over its gate's logits. Gradients flow to the gate and to the inputs, and each expert that
    answered is updated by its backend, in the backward pass of what the mixture is a part of. The experts' parameters
    are none of the mixture's, as with :class:`~pymoe.runtime.ExpertClient`.

    **What may fail.** A row needs ``k_min`` answers. Once every row has them (or cannot get them any more), the others
    have ``timeout_after_k_min`` seconds left, and all have ``forward_timeout`` seconds together. Weights are the
    softmax over the answers that came. An expert that raises, does not answer in time, is not served any more or has no
    room in its queue gives no answer; the log ``pymoe.runtime`` says so once a minute and backend. Requests that are
    not waited for any longer are cancelled if they have not begun, and ignored if they have; a batch that has begun
    keeps a worker of its runtime: there must be more (``num_workers``) than experts that hang. The backward pass asks
    those whose answers were used, all at once; gradients that do not come are zero. A backward request that has begun
    and is not waited for updates its expert all the same. Of wrong arguments no expert hears: they raise.

    A backend that has not answered ``rest_after`` requests in a row in time is not chosen for ``rest`` seconds; if it
    does not answer then, for twice as long, and so on up to 64 times ``rest``. Rows choose among the others meanwhile,
    as long as there are ``k_min``; if not, nobody rests. An answer in time ends it, and so does an error.

    **Slots.** The gate has ``max_experts`` columns, whatever happens. A backend takes one of them; the others are never
    chosen. Backends may be added, removed and replaced at any time, from any thread: calls that are under way go on
    with those that they began with. The gate's parameters stay the same objects, so an optimizer that knows them goes
    on as well; what it remembers of a column (momentum) stays when another backend takes it. ``state_dict`` holds the
    gate, and the slots of the backends by name; ``load_state_dict`` moves the backends to these slots.

    An expert may be, or hold, such a mixture itself: inside a batch a call runs what it asks for where no worker does,
    so that ``timeout_after_k_min`` does not count there.

    There are no second derivatives through the experts. ``torch.compile`` leaves a mixture as it is. Under gradient
    checkpointing experts are asked once more, and others may answer. Copies (``copy.deepcopy``) have a gate of their
    own and ask the same backends; a mixture cannot be pickled. The module's mode concerns the auxiliary losses alone.

    Args:
        backends: with names of their own and equal schemas. All outputs must be tensors of float32, float64, bfloat16
            or float16; tensors among the inputs may be of any dtype.
        top_k: K, how many backends a row asks. Where there are fewer, it asks them all.
        gate: called with the first tensor (rows, ...), returns logits (rows, max_experts); minus infinity is never
            chosen. None makes a linear layer. A gate with a method ``reset_slot(slot)`` is told when a new backend
            takes a slot.
        max_experts: slots; None: as many as there are ``backends``.
        k_min: answers that each row needs.
        forward_timeout: seconds; None: as long as it takes.
        timeout_after_k_min: seconds, in both passes; None: no limit but ``forward_timeout`` and ``backward_timeout``.
        backward_k_min: gradients that each row needs, of the answers that it used; 0: none.
        backward_timeout: seconds; None: as long as it takes.
        rest_after: requests in a row, of both passes; None: no backend ever rests.
        rest: seconds.
        detect_anomalies: answers and gradients with NaN or infinity count as if they had not come, and such values
            among the inputs, the gate's logits (but minus infinity), or the gradients that reach the mixture, raise
            ValueError. Without it, they pass.
        on_too_few: ``"raise"`` :class:`TooFewAnswersError`, in both passes; or ``"fallback"``: rows with too few
            answers get the ``fallback``, and gradients that are missing in the backward pass are zero.
        fallback: ``"zeros"``; ``"input"``, the row's first tensor, for experts that return what they take; or what is
            called with the arguments of these rows alone and returns what the experts would (a module is trained).
        aux_loss_coef, z_loss_coef: as in :class:`pymoe.nn.MoE`; over the backends that there are.

    Attributes:
        gate: the module.
        router_losses: those of the last call; None before.

    Raises, from a call:
        TypeError, ValueError: arguments that the schema does not allow, logits of another shape, or non-finite values
            with ``detect_anomalies``.
        TooFewAnswersError: see ``on_too_few``.
    """

    def __init__(
        self,
        backends: Sequence[ExpertBackend],
        *,
        top_k: int,
        gate: nn.Module | None = None,
        max_experts: int | None = None,
        k_min: int = 1,
        forward_timeout: float | None = None,
        timeout_after_k_min: float | None = 1.0,
        backward_k_min: int = 1,
        backward_timeout: float | None = None,
        rest_after: int | None = 10,
        rest: float = 1.0,
        detect_anomalies: bool = False,
        on_too_few: Literal["raise", "fallback"] = "raise",
        fallback: Fallback = "zeros",
        aux_loss_coef: float = 0.0,
        z_loss_coef: float = 0.0,
    ) -> None:
        super().__init__()
        backends = list(backends)
        max_experts = check_options(
            backends, top_k, max_experts, k_min, backward_k_min, on_too_few,
            rest_after, rest=rest, forward_timeout=forward_timeout, timeout_after_k_min=timeout_after_k_min,
            backward_timeout=backward_timeout,
        )  # fmt: skip
        self.top_k = top_k
        self.max_experts = max_experts
        self.rules = Rules(
            k_min, backward_k_min, forward_timeout, timeout_after_k_min, backward_timeout, detect_anomalies,
            on_too_few == "raise",
        )  # fmt: skip
        self.rest_after, self.rest = rest_after, rest
        self._schemas = check_schemas(backends[0])
        self._arguments = RequestSchema(self._name, self._schemas[0])
        self._output_protos = tensor_protos(self._schemas[1])
        first = tensor_protos(self._schemas[0])[0]
        self.gate = self._default_gate(first) if gate is None else gate
        check_fallback(fallback, first, self._output_protos)
        self.fallback = fallback
        self.losses = AuxiliaryLosses(aux_loss_coef, z_loss_coef)
        self.router_losses: RouterLosses | None = None
        self._dummy = torch.empty(0, requires_grad=True, device="cpu")
        self._slots = Slots(max_experts)
        for backend in backends:
            self._take_in(backend, None)

    _name = NAME

    def _default_gate(self, first: BatchTensorProto) -> SlotGate:
        if first.dtype not in FLOATING:
            raise ValueError(f"{self._name}: a gate= must be given, since the first tensor is {first!r}")
        return SlotGate(math.prod(first.size), self.max_experts)

    # --- the backends ---

    @property
    def backends(self) -> dict[str, ExpertBackend]:
        """Those that there are now, by name, in the order of their slots."""
        return {member.name: member.backend for member in self._slots.members}

    @property
    def slots(self) -> dict[str, int]:
        """The slot of each backend."""
        return self._slots.names()

    def add_backend(self, backend: ExpertBackend, slot: int | None = None) -> int:
        """Let rows choose ``backend`` from now on; returns its slot: ``slot``, or the first that is free.

        The gate's column begins anew, if the gate knows how to (the default one does).

        Raises:
            ValueError: no such free slot, a name that is taken, or another schema than the others'.
        """
        return self._take_in(backend, slot, begin_anew=True)

    def _take_in(self, backend: ExpertBackend, slot: int | None, begin_anew: bool = False) -> int:
        check_schemas(backend, self._schemas)
        return self._slots.put(backend, slot, self._reset if begin_anew else None).slot

    def remove_backend(self, backend: str | ExpertBackend) -> ExpertBackend:
        """Choose it no more; returns it. Calls that are under way still get its answers, if it is still served.

        Raises:
            KeyError: there is none such.
        """
        return self._slots.remove(backend).backend

    def replace_backend(self, old: str | ExpertBackend, new: ExpertBackend, *, keep_gate: bool = True) -> int:
        """Let ``new`` take the slot of ``old``, whose name it may have; returns the slot.

        Args:
            old: the backend, or its name.
            new: the backend that is asked from now on.
            keep_gate: choose it as often as the old one, as for one that was restored; otherwise its column begins
                anew, as in :meth:`add_backend`.

        Raises:
            KeyError: there is no such ``old``.
            ValueError: a name that is taken, or another schema than the others'.
        """
        check_schemas(new, self._schemas)
        member = self._slots.replace(old, new)
        if not keep_gate:
            self._reset(member.slot)
        return member.slot

    def _reset(self, slot: int) -> None:
        reset = getattr(self.gate, "reset_slot", None)
        if callable(reset):
            reset(slot)

    def stats(self) -> dict[str, BackendStats]:
        """What became of the requests to each backend, by name."""
        return {member.name: member.stats() for member in self._slots.members}

    # --- a call ---

    @compiler_disable  # the compiler would trace the waiting in pieces
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The experts' mixed outputs for these arguments."""
        inputs = self._arguments.flatten_arguments(args, kwargs)
        rows = self._arguments.check_inputs(inputs)
        if self.rules.detect_anomalies and not all_finite([x for x in inputs if x.is_floating_point()]):
            raise ValueError(f"{self._name}: an input holds NaN or infinity")
        members = awake(self._slots.members, self.rest_after, self.rest, self.rules.k_min)
        logits = self._logits(inputs[0], rows)
        if not members:
            few_T = torch.ones(rows, dtype=torch.bool, device="cpu")
            if rows and self.rules.raises:
                raise TooFewAnswersError(self._name, "answers", self.rules.k_min, few_T, {})
            nothing = tuple(proto.make_empty(rows, device=inputs[0].device) for proto in self._output_protos)
            outputs = list(self._attach(nothing, (), inputs, rows, trains=True))
        else:
            trains = any(member.backend.trains for member in members)
            outputs, few_T = self._ask(inputs, choose(logits, members, self.top_k), trains)
        if bool(few_T.any()) and self.fallback != "zeros":
            schema, protos = self._schemas[1], self._output_protos
            outputs = fall_back(self.fallback, outputs, inputs, (args, kwargs), schema, protos, few_T)
        return nested_pack(outputs, self._schemas[1])

    def _logits(self, x: Tensor, rows: int) -> Tensor:
        logits = self.gate(x)
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            raise TypeError(f"{self._name}: the gate must return a floating tensor, got {type(logits).__name__}")
        if logits.shape != (rows, self.max_experts):
            raise ValueError(
                f"{self._name}: the gate must return logits of shape (rows, max_experts), here "
                f"{(rows, self.max_experts)}, got {tuple(logits.shape)}"
            )
        if self.rules.detect_anomalies and not bool((logits < math.inf).all()):
            raise ValueError(f"{self._name}: a logit of the gate is NaN or infinite")
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _ask(self, inputs: list[Tensor], choice: Choice, trains: bool) -> tuple[list[Tensor], Tensor]:
        """The mixed outputs, and which rows had too few answers (on the CPU)."""
        gathered = [gather_rows(x, choice.routing) for x in inputs]
        requests = [
            ExpertRequest(
                group, group.member.forward, [x[group.begin : group.end].detach() for x in gathered], group.tokens
            )
            for group in choice.groups
        ]
        needed_T = torch.full((len(inputs[0]),), self.rules.k_min, device="cpu")
        answers, few_T = self.rules.answers_of(self._name, requests, needed_T)
        used, outputs, came_TK = use_answers(choice, answers, few_T, self._output_protos, gathered[0].device)
        outputs = self._attach(outputs, used, gathered, len(few_T), trains)
        weights_TK = self._carry_losses(weigh(choice.chosen_TK, came_TK), choice)
        return [mix(y, choice.routing, weights_TK) for y in outputs], few_T

    def _attach(
        self,
        outputs: tuple[Tensor, ...],
        used: tuple[UsedAnswer, ...],
        inputs: Sequence[Tensor],
        rows: int,
        trains: bool,
    ) -> tuple[Tensor, ...]:
        """The outputs as a part of the caller's graph, where it records one."""
        if not (torch.is_grad_enabled() and (trains or any(x.requires_grad for x in inputs))):
            return outputs
        record = ForwardRecord(self._name, self.rules, used, rows, self._output_protos)
        attached: tuple[Tensor, ...] = ExpertsNode.apply(self._dummy, record, outputs, *inputs)
        return attached

    def _carry_losses(self, weights_TK: Tensor, choice: Choice) -> Tensor:
        if not len(weights_TK):
            return weights_TK
        gate = Gate(weights_TK, choice.routing.slot, choice.load)  # of the choices nothing but their load matters here
        weights_TK, self.router_losses = self.losses(gate, choice.logits_TL)
        return weights_TK

    # --- as a module ---

    def get_extra_state(self) -> dict[str, Any]:
        """The slots of the backends, without which the gate's columns mean nothing."""
        return {"slots": self.slots}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Move the backends to the slots that they had."""
        self._slots.arrange(state["slots"])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing_keys = args[2]
        if (key := f"{prefix}_extra_state") in missing_keys:  # the state of the bare gate: slots stay as they are
            missing_keys.remove(key)

    def extra_repr(self) -> str:
        rules = self.rules
        text = f"backends={list(self.backends)}, top_k={self.top_k}, max_experts={self.max_experts}"
        for name in ("k_min", "forward_timeout", "timeout_after_k_min", "backward_k_min", "backward_timeout"):
            if getattr(rules, name) is not None:
                text += f", {name}={getattr(rules, name)}"
        return text + ("" if rules.raises else ", on_too_few='fallback'")
