"""A newcomer's mistakes with served experts and parallel calls: each message names the mistake and the remedy."""

from __future__ import annotations

import pytest
from newcomer import Table, cases, check, read

BEFORE = """
def backend(name="b", **options):
    expert = nn.Linear(8, 8)
    return ExpertBackend(name, expert, torch.optim.SGD(expert.parameters(), 0.1), args_schema=[BatchTensorProto(8)],
                         **options)

def for_ever(function):
    "Run a call that waits for ever, until it has warned."
    def call():
        with contextlib.suppress(Exception):  # its pool goes with the test
            function()

    threading.Thread(target=call, daemon=True).start()
    while not warned:
        time.sleep(0.05)

b, served = backend(), backend("served")
runtime = Runtime([served])
runtime.start()
row = torch.randn(1, 8)
"""
NAMES: Table = {
    "max_batchsize": (
        "TaskPool(lambda x: x, name='p', max_batchsize=4)",
        r"TaskPool: there is no argument 'max_batchsize': did you mean 'max_batch_size'\?",
    ),
    "batch_size": (
        "TaskPool(lambda x: x, name='p', batch_size=4)",
        r"'batch_size': did you mean 'm.._batch_size' or 'm.._batch_size'\?",
    ),
    "hivemind's pool_size": (
        "TaskPool(lambda x: x, name='p', pool_size=4)",
        "'pool_size': capacity= is how many requests the queue holds",
    ),
    "hivemind's uid": ("TaskPool(lambda x: x, uid='p')", "'uid': name= is what a pool is called"),
    "max_batchsize of a backend": (
        "backend(max_batchsize=4)",
        r"ExpertBackend: there is no argument 'max_batchsize': did you mean 'max_batch_size'\?",
    ),
    "optimizer of a backend": (
        "ExpertBackend('b', nn.Linear(8, 8), optimizer=None, args_schema=[BatchTensorProto(8)])",
        r"there is no argument 'optimizer': did you mean 'opt'\?",
    ),
    "arg_schema of a backend": (
        "ExpertBackend('b', nn.Linear(8, 8), arg_schema=[BatchTensorProto(8)])",
        "there is no argument 'arg_schema': did you mean 'args_schema'",
    ),
    "workers of a runtime": ("Runtime([b], workers=2)", r"'workers': did you mean 'num_workers'\?"),
    "k of a mixture": ("MixtureOfExpertBackends([b], k=1)", r"'k': did you mean 'top_k'\?"),
}
START = r"no Runtime serves the pool: start one with Runtime\(\[backend\]\)"
UNSERVED: Table = {
    "a result with a time limit": (
        "b.forward_pool.submit_task(row).result(timeout=0.1)",
        "TimeoutError: .* no Runtime serves the pool 'b_forward'",
    ),
    "a result without one": (
        "for_ever(b.forward_pool.submit_task(row).result)",
        r"no Runtime serves the pool: start one with Runtime\(\[pool\]\)",
    ),
    "a client with a time limit": ("ExpertClient(b, timeout=0.1)(row)", START),
    "a client without one": ("for_ever(lambda: ExpertClient(b)(row))", f"b_forward: .*{START}"),
    "a mixture": (
        "MixtureOfExpertBackends([b, backend('c')], top_k=2, forward_timeout=0.2)(row)",
        f"1 of 1 rows got fewer than 1 answers .*{START}",
    ),
}
REQUESTS: Table = {
    "another size": (
        "served.forward_pool.submit_task(torch.randn(1, 9))",
        r"tensor 0: expected shape \(rows, 8\) by the schema, got \(1, 9\)",
    ),
    "another dtype": ("served.forward_pool.submit_task(row.double())", "expected dtype float32 .* got float64"),
    "no rows": ("served.forward_pool.submit_task(row[0])", r"expected shape \(rows, 8\) by the schema, got \(8,\)"),
    "rows in the schema": (
        """
rows = ExpertBackend("rows", nn.Linear(8, 8), args_schema=[BatchTensorProto(32, 8)])
rows.forward_pool.submit_task(torch.randn(32, 8))
""",
        r"expected shape \(rows, 32, 8\) .* got \(32, 8\): a BatchTensorProto has the shape of one row",
    ),
    "two tensors": ("served.forward_pool.submit_task(row, row)", "schema expects 1 tensors, got 2"),
    "a list": ("served.forward_pool.submit_task([1.0] * 8)", "argument 0 must be a tensor, got list"),
    "numpy": ("served.forward_pool.submit_task(row.numpy())", "argument 0 must be a tensor, got numpy.ndarray"),
    "after the end": (
        "runtime.shutdown(); served.forward_pool(row)",
        "'served_forward': submit after it was closed: its "
        "Runtime has been shut down, or has removed it; submit while one serves it",
    ),
}
BACKENDS: Table = {
    "no schema": ("ExpertBackend('b', nn.Linear(8, 8))", r"e\.g\. args_schema=\(BatchTensorProto\(64\),\)"),
    "a schema of integers": (
        "ExpertBackend('b', nn.Linear(8, 8), args_schema=[8])",
        r"must describe at least one tensor, e\.g\. args_schema=\(BatchTensorProto\(64\),\)",
    ),
    "a schema of another size": (
        "ExpertBackend('b', nn.Linear(8, 8), args_schema=[BatchTensorProto(9)])",
        r"call on zeros .*args_schema=\(BatchTensorProto\(9.*: a BatchTensorProto must have the shape of one row",
    ),
    "another module's optimizer": (
        "ExpertBackend('b', nn.Linear(8, 8), torch.optim.SGD(nn.Linear(8, 8).parameters(), 0.1), "
        "args_schema=[BatchTensorProto(8)])",
        r"opt updates none of the expert's parameters. Make it from expert.parameters\(\)",
    ),
    "a number for an optimizer": (
        "ExpertBackend('b', nn.Linear(8, 8), 0.1, args_schema=[BatchTensorProto(8)])",
        "opt must be an optimizer or None, got float",
    ),
    "an optimizer of a client": (
        "torch.optim.SGD(ExpertClient(served).parameters(), 0.1)",
        "ExpertClient 'served' has no parameters: the server updates the expert",
    ),
    "two runtimes": (
        "Runtime([served]).start()",
        r"the pool 'served_\w+' is served by another Runtime, .*: give all backends to one Runtime",
    ),
    "a module for a client": (
        "ExpertClient(nn.Linear(8, 8))",
        r"expected a backend, .* make a backend of the module with ExpertBackend\(name, module, opt",
    ),
    "a module for a runtime": ("Runtime([nn.Linear(8, 8)])", r"got Linear: make a backend .* ExpertBackend\("),
    "a module for a mixture": (
        "MixtureOfExpertBackends([nn.Linear(8, 8)], top_k=1)",
        r"expected a backend, .* make a backend of the module with ExpertBackend\(",
    ),
    "one name for two": (
        "Runtime([backend(), backend()])",
        r"two pools are called 'b_forward'.*give backends and pools different names",
    ),
    "one name for a second": (
        "runtime.add(backend('served'))",
        r"two pools are called 'served_forward'.*give backends and pools different names",
    ),
    "one name for two in a mixture": (
        "MixtureOfExpertBackends([backend(), backend()], top_k=1)",
        "there already is a backend 'b', in slot 0: give each a name of its own",
    ),
}
CALLS: Table = {
    "an expert that raises": (
        """
class Bad(nn.Module):
    def forward(self, x):
        raise ZeroDivisionError("my bug")

bad = ExpertBackend("bad", Bad(), args_schema=[BatchTensorProto(8)], outputs_schema=BatchTensorProto(8))
with Runtime([bad]):
    ExpertClient(bad)(row)
""",
        "^ZeroDivisionError: my bug",
    ),
    "a function that loses rows": (
        """
pool = TaskPool(lambda x: x[:1], name="short")
with Runtime([pool]):
    pool(torch.randn(3, 8))
""",
        r"'short': the output for a batch of 3 rows has shape .*\[1, 8\]\): its first dimension must be the rows",
    ),
    "second derivatives": (
        """
x = row.requires_grad_()
(gradient,) = torch.autograd.grad(ExpertClient(served)(x).square().sum(), x, create_graph=True)
gradient.sum().backward()
""",
        r"a served expert: its backward pass cannot be differentiated again \(create_graph=True\)",
    ),
    "a map over a tensor": (
        "pymoe.map_with_parallel_backward(nn.Linear(8, 8), row)",
        "the arguments of a call must be a tuple or a list, got Tensor for call 0",
    ),
    "a map whose call raises": (
        "pymoe.map_with_parallel_backward(nn.Linear(8, 8), (row,), (torch.randn(2, 9),))",
        r"mat1 and mat2 shapes cannot be multiplied \(2x9 and 8x8\)",
    ),
}


@cases(NAMES | UNSERVED | REQUESTS | BACKENDS | CALLS)
def test_the_message_says_what_to_do(capfd: pytest.CaptureFixture[str], code: str, answer: str) -> None:
    check(read(capfd, BEFORE, code), answer)
