"""Functions that the ranks run for test_ranks_that_die.py: steps of two layers, until one rank is gone."""

import gc
import os
import signal
import threading
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from pymoe import _ranks, ep
from pymoe.ep import dispatcher, failures
from pymoe.ep.experts import ExpertMove
from pymoe.ep.placement import Placement
from pymoe.nn import MoE

RANKS, VICTIM = 4, 1


class Bug(Exception):
    """The exception that a rank raises."""


def start(rank, address):
    """Join the group of all ranks."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=300)  # a wait for it fails the test
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS, timeout=timeout)
    torch.manual_seed(0)


def model(group, **options):
    """Return two layers over a group."""
    return ep.shard(nn.Sequential(MoE(8, 8, 8, 2), MoE(8, 8, 8, 2)), group, chunks=1 if options else 2, **options)


def step_of(layers):
    """Run one forward and one backward pass."""
    layers(torch.randn(5, 8, requires_grad=True)).sum().backward()


def reporting(results, function, *args):
    """Report how a function ends: "done", "told" with the text of a GroupError, "raised" with a bug, or "other"."""
    try:
        function(*args)
    except ep.GroupError as error:
        results.send(("told", (error.layer, str(error), error.ranks)))
    except Bug as error:
        results.send(("raised", str(error)))
    except BaseException:
        results.send(("other", traceback.format_exc()))
    else:
        results.send(("done", None))
    signal.pause()  # a rank that was told or has raised stays alive with its connections


def train(rank, address, results, place=None, how="die", steps=100_000, hosts_differ=False, store="its own", **options):
    """Run steps and report each one; in the third, the victim dies, raises or sleeps at a given place."""
    if hosts_differ:
        _ranks.this_host = lambda: f"host {rank}"
    if store == "none":
        failures.GroupStore = no_store
    if store == "a file":
        address = f"file://{options.pop('file')}"
    start(rank, address)
    layers = model(dist.group.WORLD, **options)
    act = {"die": die, "raise": bug, "sleep": sleep}[how]

    def run():
        for step in range(steps):
            if rank == VICTIM and step == 2 and place is not None:
                plant(layers[1], place, act)
            if step == 2 and place == "between two steps":
                ep.redistribute(layers, Placement(tuple((3 - expert // 2,) for expert in range(8)), RANKS))
            step_of(layers)
            results.send(("step", step))

    reporting(results, run)


def no_store(*_):
    """Replace a store that some groups do not have."""
    raise RuntimeError("no store")


def die(*_):
    """End the process as if the system had killed it."""
    os.kill(os.getpid(), signal.SIGKILL)


def bug(*_):
    """Raise."""
    raise Bug("the answer is not 42")


def sleep(*_):
    """Sleep much longer than the interval at which waits look for failures."""
    time.sleep(3 * failures.LOOK.total_seconds())


def plant(layer, place, act):
    """Have the rank do something once at a given place."""
    handles = []

    def once(*_):
        handles.pop().remove()
        act()

    if place == "gate":
        handles.append(layer.router.register_forward_pre_hook(once))
    elif place == "experts":
        handles.append(layer.experts.register_forward_pre_hook(once))
    elif place == "after the experts":
        handles.append(layer.experts.register_forward_hook(once))
    elif place == "backward":
        handles.append(layer.experts.w_out.register_hook(once))
    elif place == "between two steps":
        ExpertMove.__call__ = act


def all_raise(rank, address, results):
    """Have every rank raise at the same places and start the next step, one of them late."""
    start(rank, address)
    layers = model(dist.group.WORLD)
    store = dist.group.WORLD.get_group_store()
    step_of(layers)
    dist.barrier()
    keys = store.num_keys()
    dist.barrier()

    def run():
        for place in ("experts", "backward", "after the experts"):
            plant(layers[1], place, bug)
            try:
                step_of(layers)
            except Bug:
                layers.zero_grad()
            else:
                raise AssertionError(place)
            if rank == VICTIM:
                sleep()
            step_of(layers)
        step_of(layers)
        dist.barrier()
        assert store.num_keys() == keys

    reporting(results, run)


def again(rank, address, results):
    """Have every rank raise in a backward pass and run it again, one of them late."""
    start(rank, address)
    layers = model(dist.group.WORLD)

    def run():
        loss = layers(torch.randn(5, 8, requires_grad=True)).sum()
        plant(layers[1], "backward", bug)
        try:
            loss.backward(retain_graph=True)
        except Bug:
            if rank == VICTIM:
                sleep()
            loss.backward()
        else:
            raise AssertionError
        step_of(layers)

    reporting(results, run)


def recompute(rank, address, results, how):
    """Recompute layers in the backward pass, in which the victim sleeps or raises."""
    start(rank, address)
    layers = model(dist.group.WORLD)
    store = dist.group.WORLD.get_group_store()
    seen = []

    def once(*_):
        if torch._C._current_graph_task_id() != -1 and rank == VICTIM:
            handle.remove()
            bug()

    unpack = dispatcher.TokenDispatcher.unpack

    def sleeping(*args):
        if torch._C._current_graph_task_id() != -1:
            seen.append(store.num_keys())
            if rank == VICTIM and len(seen) == 1:
                sleep()
        return unpack(*args)

    handle = layers[1].experts.register_forward_pre_hook(once if how == "raise" else lambda *_: None)
    dispatcher.TokenDispatcher.unpack = sleeping

    def run():
        for _ in range(3):
            value = torch.randn(5, 8, requires_grad=True)
            for layer in layers:
                value = checkpoint(layer, value, use_reentrant=False)
            value.sum().backward()
            dist.barrier()
        assert len(seen) == 6

    reporting(results, run)


def two_groups(rank, address, results):
    """Run a layer over all ranks and a layer over each pair; the victim dies in the layer of its pair."""
    start(rank, address)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    of_all, of_pair = model(dist.group.WORLD), model(pairs[rank // 2])

    def run():
        for step in range(100_000):
            if rank == VICTIM and step == 2:
                plant(of_pair[1], "experts", die)
            try:
                step_of(of_pair)
            except ep.GroupError as error:
                if rank > 1:
                    raise AssertionError("the pair without the victim has failed") from error
                raise
            step_of(of_all)

    reporting(results, run)


def leaves(rank, address, results):
    """Send the remains of a group after it was destroyed: threads, open files, and records in the store."""
    threading.excepthook = lambda args: results.send(("other", repr(args)))
    files = None
    for attempt in range(3):
        store = dist.TCPStore(*_host_and_port(address, attempt), RANKS, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        group = dist.new_group([0, 1, 2, 3])
        before = store.num_keys()
        dist.barrier()
        layers = model(group)
        step_of(layers)
        plant(layers[0], "experts", sleep)
        step_of(layers)
        dist.barrier()
        keys = store.num_keys() - before
        dist.barrier()
        assert not failures._members[group].store.lost
        dist.destroy_process_group()
        del group, store, layers
        gc.collect()
        now = len(os.listdir("/proc/self/fd"))
        results.send(("step", (attempt, keys, threading.active_count(), now, len(failures._members))))
        files = now if files is None else files
        if (keys, threading.active_count()) != (0, 1):
            results.send(("other", (keys, threading.enumerate())))
    results.send(("done", now - files))


def _host_and_port(address, attempt):
    host, port = address.removeprefix("tcp://").split(":")
    return host, int(port) + attempt
