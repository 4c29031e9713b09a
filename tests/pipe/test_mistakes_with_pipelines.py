"""A newcomer's mistakes with pipelines and experts over ranks: each message names the mistake and the remedy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from newcomer import Table, cases, check, read

BEFORE = """
from pymoe.pipe.skip import pop, skippable, stash

layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)]
pipe = Pipe(nn.Sequential(*layers), chunks=2)
x, y = torch.randn(4, 8), torch.randn(4, 8)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class Branch(Net):
    def forward(self, x):
        return self.layers[0](x) if x.sum() > 0 else x

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.ReLU() for _ in range(30)])
"""
NAMES: Table = {
    "num_chunks": ("Pipe(nn.Sequential(*layers), num_chunks=2)", r"Pipe: .* 'num_chunks': did you mean 'chunks'\?"),
    "torch's n_microbatches": (
        "pipeline(Net(), (x,), n_microbatches=2)",
        r"pipeline: there is no argument 'n_microbatches': did you mean 'chunks'\?",
    ),
    "split_specs": ("pipeline(Net(), (x,), split_specs={})", "'split_specs': did you mean 'split_spec'"),
    "loss of a step": ("pipe.step(x, target=y, loss=F.mse_loss)", r"argument loss: .*did you mean 'loss_fn'\?"),
    "a schedule": ("pipe.step(x, target=y, loss_fn=F.mse_loss, schedule='1f1')", "no schedule '1f1': there are gpipe"),
    "a mode of checkpoints": (
        "Pipe(nn.Sequential(*layers), checkpoint='alway')",
        "checkpoint must be one of always, except_last, never, got 'alway'",
    ),
    "a module that is not there": (
        "pipeline(Net(), (x,), split_spec={'blocks.7': SplitPoint.BEGINNING})",
        r"\(Net\) has no submodule 'blocks.7': it has layers, layers.0, layers.1, layers.2$",
    ),
    "a module that is not there, of many": (
        "pipeline(Wide(), (x,), split_spec={'blocks.7': SplitPoint.BEGINNING})",
        r"no submodule 'blocks.7': it has parts, parts.0, .*, parts.18, \.\.\.$",
    ),
    "a module misspelt": (
        "pipeline(Net(), (x,), split_spec={'layer.1': SplitPoint.BEGINNING})",
        r"no submodule 'layer.1': did you mean 'layers.1'\?",
    ),
    "a module past the last": (
        "pipeline(Net(), (x,), split_spec={'layers.3': SplitPoint.BEGINNING})",
        "no submodule 'layers.3': did you mean 'layers.2'",
    ),
    "text for a split point": (
        "pipeline(Net(), (x,), split_spec={'layers.1': 'beginning'})",
        "expected SplitPoint.BEGINNING or SplitPoint.END, got 'beginning'",
    ),
}
MODELS: Table = {
    "no Sequential": ("Pipe(Net())", r"must be an nn.Sequential, got Net: pymoe.pipeline\(model, example_args\)"),
    "a pipe of a pipe": ("Pipe(pipe)", "Pipe: the model must not be a Pipe, which is cut already: give the model it"),
    "a pipeline of a pipe": ("pipeline(pipe, (x,))", "pipeline: the model must not be a Pipe, which is cut already"),
    "a number for a policy": (
        "pipeline(Net(), (x,), split_policy=2)",
        r"must be a function of the captured graph, such as pymoe.pipe.split_into_equal_parameters\(2\) .* got 2",
    ),
    "another number of layers": ("Pipe(nn.Sequential(*layers), balance=[1, 1])", "for 2 layers, the model has 3"),
    "a branch on data": (
        "pipeline(Branch(), (x,), chunks=2)",
        "the line branches on the value of a tensor.*Alternatives: list the module .* `opaque=`",
    ),
    "an example of one row": (
        "pipeline(Net(), (x[:1],), split_spec={'layers.1': SplitPoint.BEGINNING}, chunks=2)(x)",
        "the example had 1 there: capture with an example of at least 2",
    ),
    "an example without a tuple": (
        "pipeline(Net(), x)",
        r"must be a tuple, \(x,\) for a model that takes x; got Tensor",
    ),
    "a skip that nobody begins": (
        """
@skippable(pop=["a"])
class Popper(nn.Module):
    def forward(self, x):
        return x + (yield pop("a"))

Pipe(nn.Sequential(nn.Linear(8, 8), Popper()))
""",
        "'1' declared 'a' as poppable but it was not stashed",
    ),
    "a skip that nobody ends": (
        """
@skippable(stash=["a"])
class Stasher(nn.Module):
    def forward(self, x):
        yield stash("a", x)
        return x

Pipe(nn.Sequential(Stasher(), nn.Linear(8, 8)))
""",
        r"a later one must be decorated with @skippable\(pop=\[name\]\)"
        ".*no module declared 'a' as poppable but stashed, by '0'",
    ),
}
STEPS: Table = {
    "another number of targets": (
        "pipe.step(x, target=y[:3], loss_fn=F.mse_loss)",
        r"must have the same number of rows \(dimension 0\), got 4 and 3",
    ),
    "a loss for each row": (
        "pipe.step(x, target=y, loss_fn=lambda a, b: (a - b).square().mean(1))",
        r"loss_fn must return a tensor with one element, got a tensor of shape \(2,\)",
    ),
    "a target and a loss by position": (
        "pipe.step(x, y, F.mse_loss)",
        "expected 1 input, got 3; a step takes target= and loss_fn= by name",
    ),
    "a target by position": (
        "pipeline(Net(), (x,), chunks=2).step(x, y, loss_fn=F.mse_loss)",
        "; a step takes target= and loss_fn= by name",
    ),
    "no target": (
        "pipe.step(x, loss_fn=F.mse_loss)",
        r"'target'.*the step was given no target: step\(x, target=y, loss_fn=...\)",
    ),
    "batch norm": (
        "Pipe(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), chunks=2).step(x, target=y, loss_fn=F.mse_loss)",
        "BatchNorm1d '1' normalises each micro-batch by itself, .*: take LayerNorm or GroupNorm; ",
    ),
    "batch norm of a captured model": (
        "pipeline(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), (x,), chunks=2)(x)",
        "BatchNorm1d '1' normalises each micro-batch by itself",
    ),
    "capacity": (
        "Pipe(nn.Sequential(MoE(8, 16, 4, 2, capacity_factor=1.0)), chunks=2)(x)",
        "MoE '0' may drop tokens past the capacity of each micro-batch, .*: take capacity_factor=None",
    ),
    "no loss": ("pipe.step(x, target=y)", r"give step a loss_fn \(and a target\), or let the model return its loss"),
    "padding in a loss of one's own": (
        "pipe.step(x, target=torch.tensor([1, -100, 2, 3]), loss_fn=lambda a, t: F.cross_entropy(a, t))",
        r"not known as a mean over rows \(padding.*reduction=lambda target: \(target != -100\).sum\(\)",
    ),
    "a mean over what is not padding": (
        """
def loss(out, target):
    there = target >= 0
    return out[there].square().sum() / there.sum()

pipe.step(x, target=torch.tensor([1, -100, 2, 3]), loss_fn=loss)
""",
        r"not known as a mean over rows \(padding.*reduction=lambda target: \(target != -100\).sum\(\)",
    ),
    "a sum": (
        "pipe.step(x, target=y, loss_fn=lambda a, b: F.mse_loss(a, b, reduction='sum'))",
        "the loss is a sum .*: give the step reduction='sum', too",
    ),
    "no group of ranks": ("pymoe.ep.shard(MoE(16, 32, 4, 2), None)", "got None; call init_process_group first"),
    "no processes": ("pipe.build_stage(0, 'cpu')", "Default process group has not been initialized"),
}
RANKS: Table = {
    "no experts": ("pymoe.ep.shard(nn.Linear(4, 4), group)", "must hold a pymoe.nn.MoE, .* got a Linear without"),
    "twice": (
        "pymoe.ep.shard(pymoe.ep.shard(MoE(16, 32, 4, 2), group), group)",
        "must not be sharded yet, .*: call shard once, on the whole model",
    ),
    "an optimizer made before": (
        """
moe = MoE(16, 32, 4, 2)
optimizer = torch.optim.SGD(moe.parameters(), 0.1)
pymoe.ep.shard(moe, group)
moe(torch.randn(3, 16)).sum().backward()
optimizer.step()
""",
        "an optimizer must be made after pymoe.ep.shard",
    ),
    "torch's data parallelism": (
        "nn.parallel.DistributedDataParallel(pymoe.ep.shard(MoE(16, 32, 4, 2), group))",
        r"^TypeError: DistributedDataParallel: .* got 'experts.w_in': call pymoe.ep.data_parallel\(model, mesh\)",
    ),
    "an optimizer that mixes whole and spread parameters": (
        """
moe = pymoe.ep.shard(MoE(16, 32, 4, 2), group)
moe(torch.randn(3, 16)).sum().backward()
torch.optim.AdamW(moe.parameters(), foreach=True).step()
""",
        "^ValueError: AdamW: foreach must be False for DTensors, such as experts that are spread .* got foreach=True",
    ),
    "the state of one rank in a whole model": (
        "MoE(16, 32, 4, 2).load_state_dict(pymoe.ep.shard(MoE(16, 32, 4, 2), group).state_dict())",
        "Experts 'experts': the state is of a model whose experts are spread over ranks, .*full_state_dict=True",
    ),
    "num_chunks": ("pymoe.ep.shard(MoE(16, 32, 4, 2), group, num_chunks=2)", r"shard: .*did you mean 'chunks'\?"),
    "ep_group": ("pymoe.ep.shard(MoE(16, 32, 4, 2), ep_group=group)", r"'ep_group': did you mean 'mesh'\?"),
}


@cases(NAMES | MODELS | STEPS)
def test_the_message_says_what_to_do(capfd: pytest.CaptureFixture[str], code: str, answer: str) -> None:
    check(read(capfd, BEFORE, code), answer)


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="this machine has CUDA")
def test_devices_that_are_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    code = "Pipe(nn.Sequential(*layers), devices=['cuda:0'] * 3)"
    check(
        read(capfd, BEFORE, code),
        r"devices\[0\] must be a device of this machine, got 'cuda:0': torch is .* sees 0 CUDA",
    )


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_torchs_data_parallelism_takes_experts_that_do_not_train(group: dist.ProcessGroup) -> None:
    import pymoe.ep

    moe = pymoe.ep.shard(pymoe.MoE(16, 32, 4, 2), group)
    moe.experts.requires_grad_(False)
    parallel = torch.nn.parallel.DistributedDataParallel(moe, process_group=group, init_sync=False)
    parallel(torch.randn(3, 16)).sum().backward()
    assert moe.router.weight.grad is not None
    parallel.module = None  # whoever takes the model out again; hooks of torch see this, too


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_torchs_optimizers_take_spread_experts_of_a_dtype_of_their_own(group: dist.ProcessGroup, way: str) -> None:
    """Torch puts parameters together by device and dtype, so that it mixes nothing here."""
    import pymoe.ep

    moe = pymoe.MoE(16, 32, 4, 2)
    moe.experts.to(torch.bfloat16)
    pymoe.ep.shard(moe, group)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moe(torch.randn(3, 16)).sum().backward()
    before = moe.router.weight.detach().clone()
    torch.optim.AdamW(moe.parameters(), 0.1, **{way: True}).step()
    assert not torch.equal(moe.router.weight, before)


def test_experts_that_fsdp_has_gathered_take_a_state_of_shards(group: dist.ProcessGroup) -> None:
    """A hook of fully_shard brings the parameters back to shards only after the layer was asked to load."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import pymoe

    moe, mesh = pymoe.MoE(16, 32, 4, 2), init_device_mesh("cpu", (1,))
    fully_shard(moe.experts, mesh=mesh, reshard_after_forward=False)
    fully_shard(moe, mesh=mesh)
    saved = {name: value.clone() for name, value in moe.state_dict().items()}
    with torch.no_grad():
        moe(torch.randn(3, 16))
    moe.load_state_dict(saved)
    pymoe.MoE(16, 32, 4, 2, device="meta").load_state_dict(saved, assign=True)  # takes the shards as they are


@cases(RANKS)
def test_the_message_of_ranks_says_what_to_do(
    capfd: pytest.CaptureFixture[str], code: str, answer: str, group: dist.ProcessGroup
) -> None:
    torch.manual_seed(0)
    check(read(capfd, "import pymoe.ep", code, group=group), answer)
