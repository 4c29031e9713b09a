"""Tests of bugs that were found and fixed. Docstrings describe the bugs.

Each test is in the file of the part that had the bug: operators (test_bugs_ops.py), parallel calls (_parallel), clients
that help (_helping), requests, pools and runtimes (_serving, _awaiting), pipelines (_pipe), captured models
(_captured); or here, if the bug was in several of these parts or in none.
"""

import ast
import concurrent.futures
import ctypes
import errno
import gc
import pathlib
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch
from limits import LONG
from processes import run_python

import pymoe
from pymoe._ranks import Process
from pymoe.autograd.isolated_graph import keep_hooks_outside, within_call
from pymoe.nn.expert_bias import ExpertBias
from pymoe.nn.plain_calls import are_called_plainly
from pymoe.parallel import map_with_parallel_backward

IN_FORKED_CHILDREN = pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch refuses backward passes in forked children where it sees a GPU"
)


def test_router_losses_of_a_load_whose_sum_passes_64_bits():
    """The kernel summed an int64 load in a signed integer, which is undefined behaviour if the sum overflows.

    The undefined-behaviour sanitizer reported it in a raw call whose load held the smallest int64 everywhere. The sum
    now wraps around, as torch's does in the reference.
    """
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    for value in (-(2**63), 2**63 - 1, 2**62):
        load = torch.full((3,), value)
        losses = pymoe.ops.router_losses(logits, load)
        expected = pymoe.reference.router_losses(logits, load)
        torch.testing.assert_close(losses.load_balancing, expected.load_balancing)


def test_gate_topk_backward_of_no_choices():
    """The raw operator read the first of K chosen experts even for K = 0, where there is none: the process died.

    A caller's K is at least 1, but a raw operator must be safe with any arguments.
    """
    with pytest.raises(ValueError, match="experts must have shape"):
        torch.ops.pymoe.gate_topk_backward(
            torch.zeros(4, 0), torch.zeros(4, 8), torch.zeros(4, 0, dtype=torch.int32), "softmax", True, True, 1.0
        )


@pytest.mark.only_on("cpu")
def test_quantize_experts_frees_the_weights_of_a_layer_before_the_next_one(monkeypatch):
    """A list of all experts kept the weights of every layer until the last one was quantised.

    So the peak of memory was the whole model and its packed weights, although the docstring promises one layer.
    """
    model = torch.nn.Sequential(*(pymoe.nn.MoE(32, 64, num_experts=4, top_k=2) for _ in range(3))).eval()
    weights = [weakref.ref(layer.experts.w_in) for layer in model]
    alive = []
    from_experts = pymoe.nn.QuantizedExperts.from_experts

    def watched(*arguments):
        alive.append([weight() is not None for weight in weights])
        return from_experts(*arguments)

    monkeypatch.setattr(pymoe.nn.QuantizedExperts, "from_experts", watched)
    assert pymoe.nn.quantize_experts(model, 8).layers == 3
    assert alive == [[True, True, True], [False, True, True], [False, False, True]]


def test_half_precision_subnormals_on_a_thread_that_flushes_them():
    """Widening an fp16 subnormal went through a float32 subnormal, which ``set_flush_denormal`` turns to zero.

    The vector loops use the processor's conversion, which is not affected, and so the elements of a row counted or not
    depending on whether they fell into a vector or into the rest: for K = 4, 5, 6, 7 equal terms the sums were 4, 4,
    4, 4.
    """
    tiny = 2.0**-20
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        for size in range(1, 40):
            x = torch.full((1, size), tiny, dtype=torch.float16)
            weight = torch.full((1, 1, size), 1024.0, dtype=torch.float16)
            offsets = torch.tensor([0, 1], dtype=torch.int32)
            y = pymoe.ops.grouped_linear(x, weight, offsets)
            assert y.item() == pytest.approx(size * tiny * 1024, rel=1e-3), size
    finally:
        torch.set_flush_denormal(False)


def test_a_layer_does_not_ask_what_torch_2_11_cannot_trace(monkeypatch, device):
    """``torch.compile(fullgraph=True)`` of the layer failed before torch 2.13, as loading the library there showed.

    Dynamo could not trace ``torch.amp.is_autocast_available``, which the layer called every time. It is now called
    once, when pymoe is imported.
    """

    def refuse(device_type):
        raise AssertionError(f"is_autocast_available({device_type!r}) in a forward")

    moe = pymoe.nn.MoE(8, 8, 4, 2).to(device)
    monkeypatch.setattr(torch.amp, "is_autocast_available", refuse)
    moe(torch.randn(3, 8)).sum().backward()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert moe(torch.randn(3, 8)).dtype == torch.bfloat16


@pytest.mark.only_on("cpu")
def test_grouped_linear_of_more_experts_than_the_gpu_counts():
    """The GPU kernel that makes the plan counts experts in int32. Near 2^31 experts the count overflowed, and the
    kernel wrote before the start of the plan. No model has this many experts, but a raw operator must be safe with any
    arguments.
    """
    offsets = torch.empty((1 << 30) + 1, dtype=torch.int32)  # never touched
    weight = torch.zeros(1, 1, 1).expand(1 << 30, 1, 1)
    with pytest.raises(ValueError, match="at most 1073741824 entries"):
        torch.ops.pymoe.grouped_linear(torch.zeros(2, 1), weight, offsets, None)
    with pytest.raises(ValueError, match="at most 1073741824 entries"):
        torch.ops.pymoe.grouped_linear_bias_grad(torch.zeros(2, 1), offsets)


@pytest.mark.only_on("cpu")
def test_batches_heed_the_thread_count_of_torch():
    """``torch.set_num_threads(1)`` did not reach the threads that run batches: an expert's first matrix product on a
    worker took all cores, and OpenMP's threads spun between batches.

    torch passes its count on to OpenMP thread by thread, and not before a thread's first parallel loop. The test asks
    OpenMP itself, because asking torch would hide the bug.
    """
    mapped = pathlib.Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split()[-1] for line in mapped if "libgomp" in line}
    if not loaded:
        pytest.skip("torch does not use GNU OpenMP here")
    openmp = ctypes.CDLL(min(loaded, key=lambda path: "torch" not in path))  # other threads have their own count
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pool = pymoe.TaskPool(lambda x: x + openmp.omp_get_max_threads(), name="threads")
        with pymoe.Runtime([pool], num_workers=1), concurrent.futures.ThreadPoolExecutor(1) as clients:
            for wait in (lambda future: future.result(LONG), lambda future: clients.submit(future.result).result(LONG)):
                assert wait(pool.submit_task(torch.zeros(1))).item() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.only_on("cpu", "cuda")  # a pool refuses tensors that wrap their values
def test_a_large_request_whose_last_slice_shared_a_batch_with_a_bad_request():
    """The process died from a null pointer.

    A request larger than max_batch_size keeps the results of its slices until the last one. When the last slice shared
    a batch with a request that raised, the failure discarded these results, so they were missing when the batch was
    retried in halves.
    """

    def refuse_negative(x):
        if (x < 0).any():
            raise ValueError("planted")
        return x * 2

    pool = pymoe.runtime.TaskPool(refuse_negative, name="pool", isolate=True, max_batch_size=4)
    large = torch.arange(10.0)
    futures = [pool.submit_task(x) for x in (torch.ones(1), large, torch.full((1,), -1.0), torch.ones(1))]
    with pymoe.runtime.Runtime([pool]):
        assert torch.equal(futures[1].result(), large * 2)
        assert isinstance(futures[2].exception(), ValueError)
        assert futures[0].result() == futures[3].result() == 2


@pytest.mark.only_on("cpu", "cuda")  # a pool refuses tensors that wrap their values
def test_rows_that_are_none_of_an_expanded_tensor():
    """A batch of empty rows failed with "the tensor of a request changed its memory".

    An empty tensor counts as contiguous whatever its strides, and the gradient of ``sum()`` over no rows has strides
    of 0.
    """
    pool = pymoe.TaskPool(lambda x: x * 2, name="pool")
    with pymoe.Runtime([pool]):
        assert pool(torch.zeros(()).expand(0, 4)).shape == (0, 4)
        assert pool(torch.zeros(3, 4)[:, :0].expand(3, 0)).shape == (3, 0)


@pytest.mark.only_on("cpu", "cuda")  # a pool refuses tensors that wrap their values
def test_requests_of_hundreds_of_row_shapes_still_meet():
    """A pool forgot all row shapes when it had seen 256. After that, requests of the same shape counted as different
    kinds, and each ran as its own batch: 20,000 queued requests of 500 shapes took 35 seconds instead of a tenth of a
    second.
    """
    pool = pymoe.TaskPool(lambda x: x * 2, name="pool")
    futures = [pool.submit_task(torch.ones(1, width)) for _ in range(3) for width in range(1, 601)]
    with pymoe.Runtime([pool], num_workers=1):
        assert all(bool((future.result(LONG) == 2).all()) for future in futures)
    assert pool._statistics()["batches"] == 600


@pytest.mark.only_on("cpu", "cuda")  # a pool refuses tensors that wrap their values
def test_who_waits_for_room_with_a_limit_runs_no_batch():
    """A client that submits with a timeout to a full pool ran the pool's next batch itself, however long that took: a
    limit of 0.1 s became the minutes that a slow expert needs.
    """
    ran = set()
    begun, go_on = threading.Event(), threading.Event()

    def notice(x):
        ran.add(threading.get_ident())
        return x

    def block(x):
        begun.set()
        assert go_on.wait(LONG)
        return x

    full = pymoe.TaskPool(notice, name="full", capacity=1)
    other = pymoe.TaskPool(block, name="other")
    with pymoe.Runtime([full, other], num_workers=1):
        other.submit_task(torch.ones(1))
        assert begun.wait(LONG)
        first = full.submit_task(torch.ones(1))
        late = full.submit_task(torch.ones(1), timeout=0.1)
        go_on.set()
        assert first.result(LONG) == 1
        with pytest.raises(TimeoutError, match="no room"):
            late.result(LONG)
    assert threading.get_ident() not in ran


@pytest.mark.only_on("cpu", "cuda")  # compilation knows no other device
def test_compiled_modules_in_parallel_calls_and_in_pipelines(device):
    """torch.compile's backward refused to run: "compiled with non-empty donated buffers which requires
    retain_graph=False". Calls in separate graphs kept these buffers, although each graph runs once.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).to(device)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(6, 4)
    model(x).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]

    def take_gradients():
        grads = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return grads

    model.zero_grad()
    (first,), (second,) = pymoe.map_with_parallel_backward(compiled, (x[:3],), (x[3:],))
    torch.cat([first, second]).square().mean().backward()
    torch.testing.assert_close(take_gradients(), expected)
    scale = torch.nn.Linear(4, 4).requires_grad_(False).to(device)
    torch.nn.init.eye_(scale.weight)
    torch.nn.init.zeros_(scale.bias)
    pipe = pymoe.pipe.Pipe(torch.nn.Sequential(scale, compiled), chunks=2, checkpoint="never")
    for schedule in ("1f1b", "zero-bubble"):
        pipe.step(x, loss_fn=lambda y: y.square().mean(), schedule=schedule)
        torch.testing.assert_close(take_gradients(), expected)
    loss = pipe(x).square().mean()
    with pytest.raises(RuntimeError, match="donated"):  # plain torch refuses this
        loss.backward(retain_graph=True)


def test_a_pipe_forgets_the_schedules_of_former_steps(device):
    """A pipe kept a plan for every Schedule object it was ever given, so training that builds a schedule for each
    step used more and more memory.
    """
    pipe = pymoe.Pipe(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(device))
    schedules = []
    for _ in range(200):
        schedule = pymoe.pipe.schedules.build("1f1b", 2, 1)
        pipe.step(torch.ones(1, 2), loss_fn=torch.sum, reduction="sum", schedule=schedule)
        schedules.append(weakref.ref(schedule))
    del schedule
    gc.collect()
    assert sum(schedule() is not None for schedule in schedules) <= 100


def test_a_mixture_in_several_stages_keeps_the_scale_of_its_auxiliary_losses(monkeypatch, device):
    """Two stages that had the same mixture set its scale for their micro-batches at the same time: gradients were off
    by a tenth, and the scale kept the value one of them had set, which shrank from step to step down to 0.
    """
    monkeypatch.setattr(pymoe.pipe.execution.plan, "ALWAYS_THREADS", True)
    torch.manual_seed(0)
    inside, most = [], []

    class Together(torch.nn.Module):
        """A module whose forward gives other threads time to arrive."""

        def __init__(self):
            super().__init__()
            self.mixture = pymoe.nn.MoE(4, 8, 2, 1, aux_loss_coef=1.0)

        def forward(self, x):
            inside.append(1)
            time.sleep(0.01)
            y = self.mixture(x)
            most.append(len(inside))
            inside.pop()
            return y

    layer = Together()
    model = torch.nn.Sequential(layer, torch.nn.Linear(4, 4), layer).to(device)
    x = torch.randn(8, 4)
    found = []
    for balance in ([3], [1, 1, 1], [1, 1, 1]):
        model.zero_grad()
        pymoe.Pipe(model, chunks=4, checkpoint="never", balance=balance).step(x, loss_fn=torch.sum, reduction="sum")
        found.append(layer.mixture.router.weight.grad)
        assert layer.mixture.losses.scale == 1.0
    torch.testing.assert_close(found[1:], found[:1] * 2)
    assert max(most) == 1


def test_hooks_of_leaves_on_other_devices_stay_out_of_calls():
    """The hook of a parameter on a GPU ran for every micro-batch, and again for their sum. A thread-local flag of the
    thread that started the backward pass suppressed the hook, but autograd runs a GPU's nodes on the device's own
    thread. Here, a thread acts as the device's thread, with tensors that are not on the host.
    """
    leaf = torch.ones(2, device="meta", requires_grad=True)
    seen = []
    leaf.register_hook(lambda grad: seen.append("hook"))
    keep_hooks_outside(leaf)

    def elsewhere():
        thread = threading.Thread(target=lambda: torch.autograd.grad((leaf * 2).sum(), leaf))
        thread.start()
        thread.join()

    within_call(None, elsewhere)
    assert seen == []
    elsewhere()
    assert seen == ["hook"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_a_checkpointed_batch_norm_in_several_stages_loses_no_update(schedule, monkeypatch, device):
    """To recompute a forward, a stage restores the buffers of the first run, and afterwards the current ones. Updates
    that another stage with the same batch norm made in between were lost: of 16 updates, 5 to 8 were left.
    """
    monkeypatch.setattr(pymoe.pipe.execution.plan, "ALWAYS_THREADS", True)
    norm = torch.nn.BatchNorm1d(4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), norm, torch.nn.Linear(4, 4), norm, torch.nn.Linear(4, 4))
    pipe = pymoe.Pipe(model.to(device), 4, "always", balance=[3, 2])
    for step in range(1, 9):
        pipe.step(torch.randn(12, 4), loss_fn=torch.sum, reduction="sum", schedule=schedule)
        assert norm.num_batches_tracked == 8 * step


def test_the_first_step_of_a_pipe_does_not_import_the_compiler():
    """A pipe's first step and a mixture's first forward took two seconds to import torch._dynamo, because of a
    decorator that keeps dynamo out; an interrupt meanwhile left the modules half imported.
    """
    script = """
    import sys, torch
    from torch import nn
    import pymoe
    pipe = pymoe.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)
    pipe.step(torch.ones(4, 2), loss_fn=torch.sum, reduction="sum")
    pipe(torch.ones(4, 2)).sum().backward()
    assert "torch._dynamo" not in sys.modules
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.only_on("cpu")
@IN_FORKED_CHILDREN
def test_threads_in_the_child_of_a_fork_do_not_meet_in_torchs_old_engine():
    """Torch replaces its autograd engine at the first use in a fork's child, without a lock. When a map's first two
    calls ran at the same time, they destroyed the old engine twice: one child in a hundred crashed.

    The test runs in its own process, because torch refuses gradients in the child of a process that has used a device's
    thread.
    """
    script = """
    import functools, warnings
    import torch
    import pymoe
    from pymoe.autograd import fork
    from processes import in_child

    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads

    def run_map():
        x = torch.ones(2, requires_grad=True)
        pymoe.map_with_parallel_backward(lambda t: t * 2, *[(x,)] * 5)

    def run_pipe():
        pipe = pymoe.Pipe(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), 2)
        pymoe.pipe.execution.plan.ALWAYS_THREADS = True
        pipe.step(torch.ones(4, 2), loss_fn=torch.sum, reduction="sum")

    def run_server():
        with pymoe.Runtime([pymoe.TaskPool(torch.square, name="squares")]) as runtime:
            assert runtime.pools

    def check(run):
        assert fork._is_stale
        run()
        assert not fork._is_stale  # before there were threads that could meet

    with pymoe.runtime.parallel_workers(2):
        run_map()
        for run in (run_map, run_pipe, run_server):
            assert {in_child(functools.partial(check, run)) for _ in range(20)} == {0}
    """
    ended = run_python(script, prelude=f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})\n")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.only_on("cpu")
@IN_FORKED_CHILDREN
def test_a_child_that_is_the_first_to_import_maps_has_torch_renew_its_engine():
    """``import pymoe`` loads maps, pipes and the runtime only at their first use. If that use was in the child of a
    fork, pymoe had not noticed the fork, and the threads of the child used torch's old engine.
    """
    script = """
    import sys
    import torch
    import pymoe
    from processes import in_child

    torch.ones((), requires_grad=True).exp().backward()

    def check():
        assert "pymoe.autograd.fork" not in sys.modules
        from pymoe.autograd import fork
        assert fork._is_stale
        pymoe.map_with_parallel_backward(lambda t: t * 2, *[(torch.ones(2, requires_grad=True),)] * 5)
        assert not fork._is_stale

    assert in_child(check) == 0
    """
    ended = run_python(script, prelude=f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})\n")
    assert ended.returncode == 0, ended.stderr


def test_whether_code_is_exported_is_not_asked_in_the_public_way():
    """In code that torch 2.11 compiles, ``torch.compiler.is_exporting()`` is True.

    A compiled layer therefore behaved like an exported one, so ``moe.stats`` kept the values of the last eager call, or
    zeros.
    """
    sources = pathlib.Path(pymoe.__file__).parent.rglob("*.py")
    asked = [
        f"{path.name}:{node.lineno}"
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "is_exporting"
    ]
    assert not asked


@pytest.mark.only_on("cpu", "cuda")  # compilation knows no other device
def test_a_compiled_layer_has_the_statistics_of_its_call(device):
    layer = pymoe.nn.MoE(8, 8, num_experts=4, top_k=2).to(device)
    layer(torch.randn(5, 8))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for tokens in (7, 3):
        compiled(torch.randn(tokens, 8))
        assert int(layer.stats.load.sum()) == 2 * tokens


@pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")
@pytest.mark.parametrize("kind", ["expert parallelism", "a pipe"])
def test_a_rank_waits_at_exit_until_the_threads_of_gloo_are_idle(kind, tmp_path):
    """A rank aborted once it was done: "terminate called without an active exception".

    A thread of gloo released its last tensor during finalization, and so requested the GIL. Here a thread with gloo's
    name is still running at exit, and it is ended early unless the exit waits for it.
    """
    ran = run_python(
        f"""
        import ctypes, hashlib, os, pathlib, threading
        import torch, torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        import pymoe

        dist.init_process_group("gloo", "file://{tmp_path}/meeting", rank=0, world_size=1)
        model = nn.Sequential(nn.Linear(8, 32), pymoe.nn.MoE(32, 64, num_experts=4, top_k=2), nn.Linear(32, 8))
        if {kind!r} == "a pipe":
            pymoe.Pipe(model, chunks=2, balance=[3]).build_stage(0, "cpu")
        else:
            pymoe.ep.shard(model, init_device_mesh("cpu", (1,)))
        name = "pt_gloo_runloop"
        assert name in [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
        dist.destroy_process_group()
        is_named = threading.Event()

        def compute():
            ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)  # PR_SET_NAME
            is_named.set()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without the interpreter's lock
            os.write(1, b"done")

        threading.Thread(target=compute, daemon=True).start()
        is_named.wait()
        """
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "done"


def test_a_forked_rank_waits_at_exit_where_its_parent_would_wait_too():
    """A rank that was forked from a process that had sharded a model did not wait for the threads of gloo at exit.

    The function that registers the wait remembered that it had been called. A forked child inherits this flag, but not
    the functions that multiprocessing calls at exit.
    """
    ran = run_python(
        """
        import multiprocessing, os
        from pymoe import _gloo_at_exit

        def child():
            _gloo_at_exit._wait = lambda: os.write(1, b"waited")
            _gloo_at_exit.wait_for_gloo_at_exit()
            _gloo_at_exit.wait_for_gloo_at_exit()

        _gloo_at_exit.wait_for_gloo_at_exit()
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        """
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "waited"


def test_a_map_inside_a_transform_is_exported_without_dynamo():
    """While torch exported a model, a map did not detect the active transform.

    Its calls then ran in threads, in which vmap is not active, and torch refused their tensors.
    """

    class Squares(torch.nn.Module):
        def forward(self, x):
            def total(value):
                return sum(y.sum() for (y,) in map_with_parallel_backward(torch.square, (value,), (value + 1,)))

            return torch.vmap(total)(x)

    x = torch.arange(3.0)
    exported = torch.export.export(Squares(), (x,), strict=False)
    torch.testing.assert_close(exported.module()(x), torch.tensor([1.0, 5.0, 13.0]))


@pytest.mark.only_on("cpu", "cuda")  # compilation knows no other device
def test_a_graph_knows_that_nothing_stands_between_a_layer_and_its_part():
    """torch.compile took the comparison with the ``__func__`` of a method for false. Every part of a layer then seemed
    to have a forward of its own, and compiled layers ran operator by operator.
    """
    layer = torch.nn.Linear(2, 2)
    graph = torch.compile(lambda x: x + are_called_plainly((layer, torch.nn.Linear)), backend="eager", fullgraph=True)
    torch._dynamo.reset()
    assert graph(torch.zeros(1)) == are_called_plainly((layer, torch.nn.Linear)) == 1
    layer.forward = torch.relu
    assert graph(torch.zeros(1)) == are_called_plainly((layer, torch.nn.Linear)) == 0


def test_a_wheel_is_for_the_pythons_that_are_there_although_the_last_one_is_not(tmp_path):
    """``make wheel`` looks for each Python up to 3.14. Without the last it found none, and the wheel served one Python.

    GNU make 4.3 takes the output of a shell function for an error message if the status is 127, "not found", which was
    the status of the whole loop. So it printed the names, and went on with an empty list.
    """
    for name in ("python3.10", "python3.12"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    command = [shutil.which("make"), "--silent", "--eval=pythons:; $(info $(PYTHONS))", "pythons"]
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert done.stdout.splitlines()[:1] == ["python3.10 python3.12"], done.stderr


def test_a_bias_keeps_32_bits_where_the_default_dtype_has_16():
    """The bias of each expert took torch's default dtype.

    After ``torch.set_default_dtype(torch.bfloat16)`` it had 8 bits of precision, so that most updates of 0.001 were
    rounded away.
    """
    torch.set_default_dtype(torch.bfloat16)
    try:
        bias = ExpertBias(4, 0.001).expert_bias
    finally:
        torch.set_default_dtype(torch.float32)
    assert bias.dtype == torch.float32


def test_a_process_that_cannot_be_looked_at_has_not_ended(monkeypatch):
    """A living rank was taken for dead if its file in /proc could not be opened.

    A watching process that had run out of file descriptors ended the whole step. Only the system's answer that there is
    no such process, or another start time, means that it has ended.
    """
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    own = Process.own()
    gone = own._replace(id=ended.pid)

    def no_descriptor(*_, **__):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(pathlib.Path, "read_text", no_descriptor)
    assert own.is_here()
    assert not own.has_ended()
    assert gone.has_ended()
