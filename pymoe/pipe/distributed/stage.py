"""Adapts a stage of a pipe to the schedules of ``torch.distributed.pipelining``.

torch's stages infer shapes with an additional forward, fix them, communicate only with their neighbours, and leave
partial gradients. :class:`RankStage` has their interface, so that GPipe, 1F1B, the interleaved and the zero-bubble
schedules run it unchanged, with another implementation: it sends and receives by itself when a schedule runs a forward
or backward, and gives the schedule nothing to send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pymoe._common.checks import usable_device
from pymoe._errors import add_note
from pymoe._torch_private import PipelineStageBase, pytree
from pymoe.autograd.isolated_graph import graphs_are_made
from pymoe.pipe.distributed.rank import Rank, RankStep, rank_of_pipe


def build_stage(pipe: Any, index: int, device: torch.device | str, group: dist.ProcessGroup | None = None) -> RankStage:
    """Return a stage of ``pipe`` for a schedule of ``torch.distributed.pipelining`` in this process.

    ::

        pipe = Pipe(model, balance=[3, 4], checkpoint="never")
        stage = build_stage(pipe, rank, device)
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
        schedule.step(x) if rank == 0 else schedule.step(target=y)
        optimizer.step()

    Every process must make the same pipe and build the stages that the schedule assigns to it. The
    process with stage 0 gives the model's arguments to ``schedule.step``, and the process with the last stage gives
    targets. The page docs/tutorials/pipeline_processes.md says what holds for gradients, losses, shared parameters,
    what is sent, and processes that fail.

    Args:
        pipe: a :class:`pymoe.Pipe`, the same in every process.
        index: the index of the stage, from 0.
        device: where the stage runs; its modules are moved there.
        group: the processes that share the stages; None: the default group.

    Raises:
        ValueError: the stage is out of range, the device cannot be used, or there is no default group.
    """
    group = dist.distributed_c10d._get_default_group() if group is None else group
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(pipe):
        raise ValueError(f"build_stage: index: expected one of stages 0 to {len(pipe) - 1}, got {index!r}")
    device = usable_device(device, "build_stage: device")
    rank = rank_of_pipe(pipe, group, device)
    rank.place(index, device)
    return RankStage(rank, index, device, group)


class RankStage(PipelineStageBase):
    """One stage in this process, made by :func:`build_stage`. Schedules call its methods."""

    def __init__(self, rank: Rank, index: int, device: torch.device, group: dist.ProcessGroup) -> None:
        parts = rank.staged.parts
        super().__init__(parts[index], index, len(parts), device, group)  # type: ignore[arg-type]
        self._rank = rank
        self._part = parts[index]
        # The micro-batch counts of the schedules so far, the latest last: one list for schedules with backwards (key
        # True), one for those without.
        self._chunks: dict[bool, list[int]] = {}

    def _prepare_forward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> Any:
        self._note_chunks(bool(self.has_backward), num_microbatches)
        self.args_recv_info = {micro_batch: () for micro_batch in range(num_microbatches)}
        return ()

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> Any:
        self._note_chunks(True, num_microbatches)

    def _nothing_to_exchange(self, *_: Any, **__: Any) -> Any:
        """Return no operations for the schedule: forwards and backwards send and receive by themselves."""
        return []

    _create_grad_recv_info = _get_init_p2p_neighbors_ops = _nothing_to_exchange
    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing_to_exchange
    set_local_fwd_input = get_local_bwd_output = set_local_bwd_input = _nothing_to_exchange

    def clear_runtime_states(self) -> None:
        """Begin a step: drop the outputs of the previous one."""
        self.output_chunks.clear()
        self._rank.begin(self.stage_index)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the stage's forward. Return the model's output if this is the last stage, else None."""
        return self._run("forward", fwd_chunk_id, self._forward, fwd_chunk_id, args, kwargs or {}, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the stage's backward; without ``full_backward``, only its first part, which computes input gradients."""
        if self.has_backward:
            self._run(
                "backward", bwd_chunk_id, self._now().backward, self.stage_index, bwd_chunk_id, loss, full_backward
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the second part of the stage's backward, which computes the gradients of weights."""
        if self.has_backward:
            self._run("backward of weights", bwd_chunk_id, self._now().backward_weight, self.stage_index, bwd_chunk_id)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Sum the gradients of a step. A factor other than 1 means that the losses are means over rows."""
        if self.has_backward:
            self._run("sum of gradients", -1, self._rank.reduce, self.stage_index, grad_scale_factor != 1, self.submod)

    scale_grads = perform_reduce_grad  # each class of schedules calls one of these two names

    def _forward(self, micro_batch: int, args: tuple[Any, ...], kwargs: dict[str, Any], save: bool) -> Any:
        step = self._rank.step or self._open()
        inputs: Sequence[Any] = ()
        rows = 0
        if self.is_first:
            inputs, rows = self._rank.staged.flatten_inputs(args, kwargs), _rows(args, kwargs)
        values = step.forward(self.stage_index, micro_batch, inputs, rows)
        output = None
        if values is not None:
            output = self._rank.staged.unflatten_outputs(values)
            if save:
                self.output_chunks.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output))
            if self.has_backward:
                # The schedule computes the loss next.
                self._rank.failure_detector.at("loss", self.stage_index, micro_batch)
        if not self.has_backward and step.forwards == len(step.plan.stages) * self._count():
            self._rank.finish(step)
        return output

    def _now(self) -> RankStep:
        step = self._rank.step
        assert step is not None
        return step

    def _open(self) -> RankStep:
        rank_of = [self.stage_index_to_group_rank[stage] for stage in range(self.num_stages)]
        known = self._chunks.get(bool(self.has_backward), [])
        graphs = bool(self.has_backward) and graphs_are_made()
        part, self._part = self._part, self._rank.staged.present_parts()[self.stage_index]
        if self.submod is part:  # the user has not wrapped the module
            self.submod = self._part  # layers of the model may have been replaced
        return self._rank.open(rank_of, self._count(), graphs, len(known) == 1)

    def _note_chunks(self, has_backward: bool, count: int) -> None:
        """Record a schedule's number of micro-batches, after those of earlier schedules.

        A schedule gives its number only before its first step, and does not identify itself in a step. So if schedules
        with different numbers use the stage, the number in a step is a guess: that of the newest schedule.
        """
        self.chunks = count
        known = self._chunks.setdefault(has_backward, [])
        if count in known:
            known.remove(count)
        known.append(count)

    def _count(self) -> int:
        mode = bool(self.has_backward)
        return (self._chunks.get(mode) or self._chunks.get(not mode) or [1])[-1]

    def _run(self, phase: str, micro_batch: int, function: Callable[..., Any], *args: Any) -> Any:
        detector = self._rank.failure_detector
        try:
            detector.at(phase, self.stage_index, micro_batch)
            return function(*args)
        except BaseException as error:
            of = "" if micro_batch < 0 else f" of micro-batch {micro_batch}"
            add_note(error, f"pymoe.pipe: rank {self._rank.rank}, stage {self.stage_index}, {phase}{of}")
            instead = detector.fail(error)
            if instead is None:
                raise
            raise instead from error


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.shape[0]
    return 1
