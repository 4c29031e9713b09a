"""MixtureOfExpertBackends: a gate over served experts, some of which may be slow or dead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pymoe._common.names import explain_arguments
from pymoe._common.types import FLOATING, Gate, RouterLosses
from pymoe.autograd.compiler_disable import compiler_disable
from pymoe.autograd.graph_nodes import ANCHOR
from pymoe.mixture.autograd_node import ForwardRecord, UsedAnswer, use_answers
from pymoe.mixture.fan_out import ExpertRequest, TooFewAnswersError, ask
from pymoe.mixture.members import Slots, members_to_ask
from pymoe.mixture.options import NAME, Fallback, Rules, check_fallback, check_mixture, check_schemas, fall_back
from pymoe.mixture.routing import Choice, SlotGate, choose, gather_rows, mix, weigh
from pymoe.mixture.stats import BackendStats
from pymoe.nn.losses import AuxiliaryLosses
from pymoe.runtime.batch_tensor_proto import BatchTensorProto
from pymoe.runtime.client import ServedCall
from pymoe.runtime.gradients import all_finite
from pymoe.runtime.nested import nested_pack
from pymoe.runtime.protocols import Backend
from pymoe.runtime.schema import RequestSchema, tensor_protos


class MixtureOfExpertBackends(nn.Module):
    """A gate over served experts: every row is sent to the ``top_k`` experts with the largest logits.

    ``mixture(*args, **kwargs)`` takes and returns the same as one of the experts. The gate gets the first tensor. Each
    chosen expert gets one request with the rows that chose it, through its pool; all requests are sent together. A
    row's output is the sum of its experts' outputs, weighted by the softmax over their logits. Gradients flow to the
    gate and to the inputs. During the backward pass, every backend that trains updates its expert if the expert's
    outputs were used.
    The experts' parameters are not parameters of this module, as with :class:`~pymoe.runtime.ExpertClient`.

    **Failures.** An answer is the result of a request. A row needs ``k_min`` answers. Once every row has them (or
    cannot get them any more), the remaining requests have ``timeout_after_k_min`` seconds left; all together have
    ``forward_timeout`` seconds. Weights are the softmax over the logits of the experts that gave an answer. An expert
    gives no answer if it raises, is too slow, is no longer served or has no room in its queue in time; the logger
    ``pymoe.runtime`` reports this at most once a minute for each backend. A request that the mixture stops waiting for
    is cancelled if it has not begun, and ignored if it has; a batch that has begun keeps a worker of its runtime busy,
    so ``num_workers`` must exceed the number of experts that may hang. The backward pass sends one request to every
    expert whose answer was used (if no input needs a gradient, only to those that train), all together; missing
    gradients are zero. A backward request that has begun updates its expert even if the mixture does not wait for it.
    Invalid arguments raise before any request is sent.

    **Backoff.** A backend whose requests time out ``rest_after`` times in a row gets no requests for ``rest`` seconds;
    if a request times out after that, for twice as long, and so on up to 64 times ``rest``. Meanwhile, rows choose
    among the other backends; if these are fewer than ``k_min``, among all that are served. A result or an error in time
    ends the backoff. A backend that no runtime serves, or whose server cannot be reached, is left out immediately,
    unless fewer than ``k_min`` backends are served, and gets requests again as soon as it is back.

    **Slots.** The gate always has ``max_experts`` columns. A backend takes one of them; free ones are never chosen.
    Backends may be added, removed and replaced at any time and from any thread; pending calls continue with the
    backends with which they began. The gate's parameters stay the same objects, so an optimizer of them continues to
    work; its state for a column (momentum) stays when another backend takes the slot. ``state_dict`` has the gate, and
    the slots of the backends by name; ``load_state_dict`` moves the backends to these slots.

    An expert may itself be such a mixture, or contain one. Inside a batch, a call runs its requests in its own thread,
    since it may be that no worker is free, and ``timeout_after_k_min`` has no effect.

    There are no second derivatives through the experts. ``torch.compile`` does not compile a mixture (graph break).
    Under gradient checkpointing every forward request is sent twice, and the second time other experts may give the
    answers. Copies (``copy.deepcopy``) have their own gate and the same backends; a mixture cannot be pickled.
    ``train()`` and ``eval()`` affect only the gate and the auxiliary losses, not the experts.

    Args:
        backends: at least one, with distinct names and equal schemas, of this process
            (:class:`~pymoe.runtime.ExpertBackend`) or of others (:func:`pymoe.remote.connect`). All outputs must be
            tensors of float32, float64, bfloat16 or float16; tensors among the inputs may have any dtype.
        top_k: K, the number of backends to which a row is sent; all if there are fewer.
        gate: called with the first tensor (rows, ...), returns logits (rows, max_experts), where minus infinity is
            never chosen. None makes a linear layer. If the gate has a method ``reset_slot(slot)``, :meth:`add_backend`
            calls it, and so does :meth:`replace_backend` with ``keep_gate=False``.
        max_experts: number of slots; None: ``len(backends)``.
        k_min: number of answers that each row needs.
        forward_timeout: seconds; None: no limit.
        timeout_after_k_min: seconds, in both passes; None: only ``forward_timeout`` and ``backward_timeout``.
        backward_k_min: number of gradients that each row needs, from the experts whose answers it used (all of these,
            if they are fewer); 0: none.
        backward_timeout: seconds; None: no limit.
        rest_after: timeouts in a row, of both passes, after which a backend backs off; None disables backoff.
        rest: seconds of the first backoff.
        detect_anomalies: treat answers and gradients with NaN or infinity as missing, and raise ValueError for such
            values among the inputs, the gate's logits (minus infinity is allowed), or the gradients that reach the
            mixture. If false, nothing is checked.
        on_too_few: for rows with too few answers, ``"raise"`` :class:`TooFewAnswersError` (in both passes), or use the
            ``"fallback"`` (missing gradients are zero in the backward pass).
        fallback: ``"zeros"``; ``"input"``, the row of the first tensor, for experts that return what they take; or a
            callable that gets the arguments of only these rows and returns what the experts would return (gradients
            reach the parameters of a module).
        aux_loss_coef, z_loss_coef: as in :class:`pymoe.nn.MoE`; the losses of a call are computed over the logits of
            the backends that rows could choose.

    Attributes:
        gate: the gate's module.
        router_losses: the auxiliary losses of the last call that had rows and a backend to ask; None before that.

    The constructor raises TypeError or ValueError for invalid arguments. A call raises the following errors.

    Raises:
        TypeError, ValueError: arguments that do not fit the schema, logits of another shape, non-finite values with
            ``detect_anomalies``, or a fallback that returns anything other than outputs for its rows.
        TooFewAnswersError: see ``on_too_few``.

    Example:
        >>> schema = [pymoe.BatchTensorProto(8)]
        >>> backends = [pymoe.ExpertBackend(name, torch.nn.Linear(8, 8), None, args_schema=schema) for name in "abc"]
        >>> mixture = pymoe.MixtureOfExpertBackends(backends, top_k=2, forward_timeout=10)
        >>> with pymoe.Runtime(backends):
        ...     output = mixture(torch.randn(5, 8))
        >>> output.shape, sum(one.forward.answered for one in mixture.stats().values()) >= 2
        (torch.Size([5, 8]), True)
    """

    @explain_arguments(k="top_k", k_best="top_k", timeout="forward_timeout", experts="backends")
    def __init__(
        self,
        backends: Sequence[Backend],
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
        self.rules = Rules(
            k_min, backward_k_min, forward_timeout, timeout_after_k_min, backward_timeout, rest_after, rest,
            detect_anomalies, on_too_few == "raise",
        )  # fmt: skip
        self.top_k = top_k
        self.max_experts = check_mixture(backends, top_k, max_experts, self.rules, on_too_few)
        self._schemas = check_schemas(backends[0])
        self._arguments = RequestSchema(self._name, self._schemas[0])
        self._output_protos = tensor_protos(self._schemas[1])
        first = tensor_protos(self._schemas[0])[0]
        self.gate = self._default_gate(first) if gate is None else gate
        check_fallback(fallback, first, self._output_protos)
        self.fallback = fallback
        self.losses = AuxiliaryLosses(aux_loss_coef, z_loss_coef)
        self.router_losses: RouterLosses | None = None
        self._slots = Slots(self.max_experts)
        for backend in backends:
            check_schemas(backend, self._schemas)
            self._slots.add(backend, None)

    _name = NAME

    def _default_gate(self, first: BatchTensorProto) -> SlotGate:
        if first.dtype not in FLOATING:
            raise ValueError(f"{self._name}: a gate= must be given, since the first tensor is {first!r}")
        return SlotGate(math.prod(first.size), self.max_experts)

    # --- backends ---

    @property
    def backends(self) -> dict[str, Backend]:
        """Return the current backends by name, in the order of their slots."""
        return {member.name: member.backend for member in self._slots.members}

    @property
    def slots(self) -> dict[str, int]:
        """Return the slot of each backend, by the backend's name."""
        return self._slots.names()

    def add_backend(self, backend: Backend, slot: int | None = None) -> int:
        """Add ``backend``, so that rows may choose it, and reset its column of the gate if the gate has ``reset_slot``.

        Args:
            backend: the new backend.
            slot: the slot of the backend; None: the first free slot.

        Returns:
            The slot that ``backend`` got.

        Raises:
            TypeError: ``backend`` is not a :class:`~pymoe.runtime.Backend`, or ``slot`` is not an int.
            ValueError: the slot is taken or does not exist, no slot is free, the name is taken, or the schemas differ
                from those of the other backends.
        """
        check_schemas(backend, self._schemas)
        return self._slots.add(backend, slot, prepare=self._reset).slot

    def remove_backend(self, backend: str | Backend) -> Backend:
        """Remove ``backend`` from the mixture, and return it. Pending calls still use its answers, as long as it is
        served.

        Raises:
            KeyError: the mixture has no such backend.
        """
        return self._slots.remove(backend).backend

    def replace_backend(self, old: str | Backend, new: Backend, *, keep_gate: bool = True) -> int:
        """Replace the backend ``old`` with ``new``, in the same slot, and return the slot.

        Args:
            old: the backend, or its name.
            new: the backend that gets requests from now on; it may have the name of ``old``.
            keep_gate: keep the gate's column for the slot, for example if ``new`` has the weights of ``old``; otherwise
                the column is reset, as in :meth:`add_backend`.

        Raises:
            KeyError: the mixture has no backend ``old``.
            TypeError: ``new`` is not a :class:`~pymoe.runtime.Backend`.
            ValueError: the name is taken, or the schemas differ from those of the other backends.
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
        """Return the statistics of the requests to each backend, by the backend's name."""
        return {member.name: member.stats() for member in self._slots.members}

    # --- calls ---

    @compiler_disable  # the compiler would break the graph at every wait
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weighted sums of the experts' outputs for these arguments, row by row."""
        inputs = self._arguments.flatten_arguments(args, kwargs)
        rows = self._arguments.check_inputs(inputs)
        if self.rules.detect_anomalies and not all_finite([x for x in inputs if x.is_floating_point()]):
            raise ValueError(f"{self._name}: an input holds NaN or infinity")
        members = members_to_ask(self._slots.members, self.rules)
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
        """Send ``inputs`` to the members of ``choice``.

        Return the outputs, which are weighted sums of the answers, and a (T,) mask on the CPU of the rows with too few
        answers.
        """
        gathered = [gather_rows(x, choice.routing) for x in inputs]
        requests = [
            ExpertRequest(
                group, group.member.forward, [x[group.begin : group.end].detach() for x in gathered], group.tokens
            )
            for group in choice.groups
        ]
        needed_T = torch.full((len(inputs[0]),), self.rules.k_min, device="cpu")
        answers, few_T = ask(self._name, self.rules, requests, needed_T)
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
        """Return ``outputs`` with a history whose backward requests gradients from the experts of ``used``.

        Return ``outputs`` unchanged if grad mode is off, or if no backend trains and no input needs a gradient.
        """
        if not (torch.is_grad_enabled() and (trains or any(x.requires_grad for x in inputs))):
            return outputs
        record = ForwardRecord(self._name, self.rules, used, rows, self._output_protos)
        attached: tuple[Tensor, ...] = ServedCall.apply(ANCHOR, record.gradients, outputs, *inputs)
        return attached

    def _carry_losses(self, weights_TK: Tensor, choice: Choice) -> Tensor:
        if not len(weights_TK):
            return weights_TK
        gate = Gate(weights_TK, choice.routing.slot, choice.load)  # the losses do not read `experts`
        weights_TK, self.router_losses = self.losses(gate, choice.logits_TL)
        return weights_TK

    # --- the module ---

    def get_extra_state(self) -> dict[str, Any]:
        """Return the slots of the backends; a slot is the backend's column of the gate."""
        return {"slots": self.slots}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Move the backends to the slots in the saved state."""
        self._slots.arrange(state["slots"])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing_keys = args[2]
        if (key := f"{prefix}_extra_state") in missing_keys:  # a state without slots leaves the present slots unchanged
            missing_keys.remove(key)

    def extra_repr(self) -> str:
        rules = self.rules
        text = f"backends={list(self.backends)}, top_k={self.top_k}, max_experts={self.max_experts}"
        for name in ("k_min", "forward_timeout", "timeout_after_k_min", "backward_k_min", "backward_timeout"):
            if getattr(rules, name) is not None:
                text += f", {name}={getattr(rules, name)}"
        return text + ("" if rules.raises else ", on_too_few='fallback'")
