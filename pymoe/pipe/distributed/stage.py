"""A stage of a pipe, for the schedules of ``torch.distributed.pipelining``.

torch's stages learn shapes from an additional forward, keep them, talk to their neighbours alone, and leave partial
gradients. :class:`RankStage` has the same face for schedules, so that GPipe, 1F1B, the interleaved and the zero-bubble
schedules run it as they are, and is pymoe's own behind: it sends and receives by itself when a schedule runs a forward
or backward, and gives schedules nothing to send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils import _pytree

from pymoe.autograd.isolated_graph import graphs_are_made
from pymoe.pipe.devices import usable_device
from pymoe.pipe.distributed.passage import Passage
from pymoe.pipe.distributed.rank import Rank, rank_of_pipe

__all__ = ["RankStage", "build_stage"]


def build_stage(pipe: Any, index: int, device: torch.device | str, group: dist.ProcessGroup | None = None) -> RankStage:
    """A stage of ``pipe`` for a schedule of ``torch.distributed.pipelining``, to be run by this process.

    ::

        pipe = Pipe(model, balance=[3, 4], checkpoint="never")
        stage = build_stage(pipe, rank, device)
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
        schedule.step(x) if rank == 0 else schedule.step(target=y)
        optimizer.step()

    Every process makes the same pipe and builds the stages that it runs; a schedule decides which these are.

    - The model's arguments are given to ``schedule.step`` in the process that has stage 0, which sends them on to
      stages that take them. What other processes give is not looked at. Targets are given where the last stage is.
    - Rows are dimension 0 of the first tensor among the arguments. A micro-batch counts by its rows, unless the
      schedule has ``scale_grads=False``: then losses are sums. Numbers of rows may change from step to step.
    - Gradients are added to ``.grad`` once, at the end of a step, so hooks of parameters are called once, and
      gradients of several steps add up. Of a parameter that stages of several processes share every process has a
      copy with the same gradient, the sum; before the first step copies are made equal to that of the first stage.
    - ``pymoe.pipe.micro_batch().weight`` is 1 here: what a micro-batch counts is known when all have come.
    - A pipe that returns its own loss takes ``loss_fn=lambda output, _: output["loss"]``, and any target.
    - A stage's module may be put into ``DistributedDataParallel`` (``stage.submod = DistributedDataParallel(...)``, its
      group being the processes that have the same stage of other pipes): it averages what is added to ``.grad``.
    - ``pipe.train()`` and ``pipe.eval()`` are called in every process.
    - The pipe's ``checkpoint`` holds here, too; ``chunks`` is the schedule's own.
    - What goes from process to process is anything that can be pickled, with plain dense tensors.
    - A process that dies or raises ends the others within seconds: their steps raise
      :class:`pymoe.pipe.distributed.RankError`, which says who failed, where and why. The group is of no use then. What
      a loss function raises is told the others when it ends the process; for programs that go on after an error put
      ``with pymoe.pipe.distributed.watching(group):`` around ``schedule.step``.

    Args:
        pipe: a :class:`pymoe.Pipe`, the same in every process.
        index: which stage.
        device: where it runs; its modules are moved there.
        group: whose processes share the stages; None: the default group.

    Raises:
        ValueError: there is no such stage, or no such device.
    """
    group = dist.distributed_c10d._get_default_group() if group is None else group
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(pipe):
        raise ValueError(f"build_stage: the pipe has stages 0 to {len(pipe) - 1}, got {index!r}")
    device = usable_device(device, "build_stage: device")
    rank = rank_of_pipe(pipe, group, device)
    rank.place(index, device)
    return RankStage(rank, index, device, group)


class RankStage(_PipelineStageBase):
    """One stage in this process. Made by :func:`build_stage`; schedules call the rest."""

    def __init__(self, rank: Rank, index: int, device: torch.device, group: dist.ProcessGroup) -> None:
        parts = rank.staged.parts
        super().__init__(parts[index], index, len(parts), device, group)  # type: ignore[arg-type]
        self._rank = rank
        self._chunks: dict[
            bool, list[int]
        ] = {}  # of the schedules so far, the last one last, by whether there are backwards

    def _prepare_forward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> Any:
        self._note_chunks(bool(self.has_backward), num_microbatches)
        self.args_recv_info = {micro_batch: () for micro_batch in range(num_microbatches)}
        return ()

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> Any:
        self._note_chunks(True, num_microbatches)

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """None: :meth:`forward_one_chunk` receives."""
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """None: :meth:`forward_one_chunk` has sent."""
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """None: :meth:`backward_one_chunk` receives."""
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """None: :meth:`backward_one_chunk` has sent."""
        return []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Stages of one rank find each other's outputs by themselves."""

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Nothing, likewise."""
        return ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Likewise."""

    def clear_runtime_states(self) -> None:
        """A schedule begins a step."""
        self.output_chunks.clear()
        self._rank.begin(self.stage_index)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """The stage's forward. Returns the model's output in the last stage."""
        return self._run("forward", fwd_chunk_id, self._forward, fwd_chunk_id, args, kwargs or {}, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The stage's backward, or its first part."""
        if self.has_backward:
            self._run(
                "backward", bwd_chunk_id, self._now().backward, self.stage_index, bwd_chunk_id, loss, full_backward
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The second part."""
        if self.has_backward:
            self._run("backward of weights", bwd_chunk_id, self._now().backward_weight, self.stage_index, bwd_chunk_id)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """The backwards of a step have run. A factor other than 1 says that losses are means."""
        self.perform_reduce_grad(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The same."""
        if self.has_backward:
            self._run("sum of gradients", -1, self._rank.reduce, self.stage_index, grad_scale_factor != 1, self.submod)

    def _forward(self, micro_batch: int, args: tuple[Any, ...], kwargs: dict[str, Any], save: bool) -> Any:
        passage = self._rank.passage or self._open()
        inputs: Sequence[Any] = ()
        rows = 0
        if self.is_first:
            inputs, rows = self._rank.staged.enter(args, kwargs), _rows(args, kwargs)
        values = passage.forward(self.stage_index, micro_batch, inputs, rows)
        output = None
        if values is not None:
            output = self._rank.staged.leave(values)
            if save:
                self.output_chunks.append(_pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output))
            if self.has_backward:
                self._rank.failure_detector.at("loss", self.stage_index, micro_batch)  # which the schedule goes on with
        if not self.has_backward and passage.forwards == len(passage.plan.stages) * self._count():
            self._rank.end_without_backward()
        return output

    def _now(self) -> Passage:
        passage = self._rank.passage
        assert passage is not None
        return passage

    def _open(self) -> Passage:
        rank_of = [self.stage_index_to_group_rank[stage] for stage in range(self.num_stages)]
        known = self._chunks.get(bool(self.has_backward), [])
        graphs = bool(self.has_backward) and graphs_are_made()
        return self._rank.open(rank_of, self._count(), graphs, len(known) == 1)

    def _note_chunks(self, has_backward: bool, count: int) -> None:
        """Schedules say this before their first step alone, and then nothing tells which of them it is that runs."""
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
            if hasattr(error, "add_note"):  # Python 3.11
                of = "" if micro_batch < 0 else f" of micro-batch {micro_batch}"
                error.add_note(f"pymoe.pipe: rank {self._rank.rank}, stage {self.stage_index}, {phase}{of}")
            instead = detector.fail(error)
            if instead is None:
                raise
            raise instead from error


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for leaf in _pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.shape[0]
    return 1
