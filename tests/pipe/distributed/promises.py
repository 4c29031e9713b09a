"""What ranks do, each to show something that a pipe on several processes must do, or must not."""

import copy

import by_hand
import torch
import torch.distributed as dist
from pipe_models import WIDTH, batches, row_model, sgd
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from train import CPU, largest_difference, make, own_gradients, run, stages_of, steps

import pymoe
from pymoe.nn import MoE


def linear_model(world, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2 * world)])


def parallel(model, name, rank, world, micro_batches, loss_fn=F.mse_loss, checkpoint="never", **options):
    """A copy of a model on the ranks."""
    count = stages_of(name, world)
    balance = [len(model) // count] * count
    pipe = pymoe.Pipe(copy.deepcopy(model), balance=balance, checkpoint=checkpoint)
    return pipe, *make(name, pipe, rank, world, micro_batches, loss_fn, **options)


def compare(model, pipe, stages):
    return largest_difference(own_gradients(pipe, stages), {n: p.grad for n, p in model.named_parameters()})


def on_one_rank(rank, world):
    """Every rank has a whole pipe of its own, in a group of itself alone."""
    groups = [dist.new_group([one]) for one in range(world)]
    return steps(0, 1, "ScheduleInterleaved1F1B", micro_batches=4, count=3, group=groups[rank])


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = self.tokens = 0

    def forward(self, x):
        self.calls += 1
        self.tokens += len(x)
        return x


def forwards(rank, world, name):
    """Calls and rows that every layer has seen in two steps, and batches that a batch norm has counted."""
    model = nn.Sequential(*[nn.Sequential(nn.BatchNorm1d(WIDTH), Counting()) for _ in range(2 * world)])
    _, schedule, stages = parallel(model, name, rank, world, 2 * world)
    for x, y in batches(2, [12]):
        run(schedule, stages, (x,), target=y)
    found = [part for stage in stages for part in stage.submod.modules()]
    return [
        [part.calls, part.tokens] if isinstance(part, Counting) else int(part.num_batches_tracked)
        for part in found
        if isinstance(part, (Counting, nn.BatchNorm1d))
    ]


def accumulation(rank, world, name, rows, **options):
    """Gradients of several steps beside those of the unsplit model."""
    model = linear_model(world)
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world, **options)
    for x, y in batches(len(rows), rows):
        F.mse_loss(model(x), y).backward()
        run(schedule, stages, (x,), target=y)
    return compare(model, pipe, stages)


def sums(rank, world, name):
    """Losses that are sums, of uneven micro-batches."""
    model = linear_model(world)
    loss = nn.MSELoss(reduction="sum")
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world, loss_fn=loss, scale_grads=False)
    for x, y in batches(2, [4 * world - 1]):
        loss(model(x), y).backward()
        run(schedule, stages, (x,), target=y)
    return compare(model, pipe, stages)


def batch_sizes(rank, world, name):
    """Outputs of one schedule for batches of other sizes and widths each time: of rows of tokens, say."""
    model = linear_model(world)
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world)
    worst, generator = 0.0, torch.Generator().manual_seed(0)
    for shape in ((16, WIDTH), (8, WIDTH), (33, WIDTH), (9, 3, WIDTH), (7, WIDTH)):
        x, y = torch.randn(2, *shape, generator=generator)
        expected = model(x)
        F.mse_loss(expected, y).backward()
        output, _ = run(schedule, stages, (x,), target=y)
        if output is not None:
            worst = max(worst, (output - expected).abs().max().item())
    return max(worst, compare(model, pipe, stages))


def by_hand_steps(rank, world, name, model, arguments):
    """Largest difference of gradients of parameters and arguments, and the output's, in some steps."""
    model = getattr(by_hand, model)()
    pipe = pymoe.Pipe.of(by_hand.ByHand(copy.deepcopy(model)), checkpoint="never")

    def loss_fn(output, target):
        y = output if isinstance(output, torch.Tensor) else output["y"] * (1 + output["norms"].mean())
        return F.mse_loss(y, target)

    schedule, stages = make(name, pipe, rank, world, world, loss_fn)
    worst = 0.0
    generator = torch.Generator().manual_seed(0)
    for rows in (2 * world, 2 * world, 3 * world):  # means over micro-batches of this loss are not means over all

        def tensor(rows=rows):
            return torch.randn(rows, 4, generator=generator).requires_grad_()

        named = {"mask": tensor(), "power": 3, "bias": tensor()} if arguments else {}
        x, y = tensor(), torch.randn(rows, 4, generator=generator)
        tensors = [x, *[value for value in named.values() if isinstance(value, torch.Tensor)]]
        twins = {id(t): t.detach().clone().requires_grad_() for t in tensors}
        cut = {key: twins.get(id(value), value) for key, value in named.items()}
        model.zero_grad()
        pipe.zero_grad()
        outputs = []
        for number in range(world):
            part = slice(number * rows // world, (number + 1) * rows // world)
            some = {key: v[part] if isinstance(v, torch.Tensor) else v for key, v in named.items()}
            outputs.append(model(x[part], **some))
            (loss_fn(outputs[-1], y[part]) / world).backward()
        found, _ = run(schedule, stages, (twins[id(x)],), cut, target=y)
        worst = max(worst, compare(model, pipe, stages))
        if found is not None:
            for key in ("y", "norms") if isinstance(found, dict) else (None,):
                mine = found if key is None else found[key]
                expected = torch.cat([output if key is None else output[key] for output in outputs])
                worst = max(worst, (mine - expected).abs().max().item())
        if rank == 0:
            for one in tensors:
                worst = max(worst, (one.grad - twins[id(one)].grad).abs().max().item())
    return worst


class Tied(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x):
        return F.linear(x, self.weight)


def tied(rank, world, name, same_start=True):
    """Differences of gradients, and the copies of the shared parameter on all ranks after some steps."""

    def build(seed):
        torch.manual_seed(seed)
        embedding = nn.Embedding(10, WIDTH)
        middle = [nn.Linear(WIDTH, WIDTH) for _ in range(stages_of(name, world) - 2)]
        return nn.Sequential(embedding, *middle, Tied(embedding))

    model = build(0)
    pipe = pymoe.Pipe(build(0 if same_start else rank), checkpoint="never")
    if not same_start:
        model = copy.deepcopy(pipe)

    def loss_fn(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    schedule, stages = make(name, pipe, rank, world, 2 * world, loss_fn)
    own = [p for stage in stages for p in stage.submod.parameters()]
    optimizers = sgd(model), torch.optim.SGD(dict.fromkeys(own), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    worst, copies = 0.0, []
    for rows in (12, 11, 13):
        tokens, target = torch.randint(0, 10, (2, rows, 3), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_fn(model(tokens), target).backward()
        run(schedule, stages, (tokens,), target=target)
        worst = max(worst, compare(model, pipe, stages))
        for optimizer in optimizers:
            optimizer.step()
    if any(stage.is_first or stage.is_last for stage in stages):
        copies = next(pipe.parameters()).detach().flatten().tolist()
    return {"worst": worst, "copy": copies}


def auxiliary_loss(rank, world, name):
    """Gradients of a layer in the middle that injects a loss, micro-batches uneven."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), *[MoE(8, 12, 4, 2, z_loss_coef=0.1) for _ in range(2 * world - 2)], nn.Linear(8, 8)]
    model = nn.Sequential(*layers).double()
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4 * world + 3, 8, generator=generator)
    F.mse_loss(model(x), y).backward()
    without = own_gradients(pipe, stages)
    run(schedule, stages, (x,), target=y)
    return {"worst": compare(model, pipe, stages), "parameters": len(without)}


backwards = [0]


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        backwards[0] += 1
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        return Noted.apply(x, self.weight)


def function_backwards(rank, world, name):
    """How often a Function's backward has run, for how many layers and micro-batches."""
    model = nn.Sequential(*[Scale() for _ in range(2 * world)])
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world)
    (x, y), *_ = batches(1, [4 * world])
    F.mse_loss(model(x), y).backward()
    backwards[0] = 0
    run(schedule, stages, (x,), target=y)
    layers = sum(len(stage.submod) for stage in stages)
    return {"calls": backwards[0], "expected": layers * 2 * world, "worst": compare(model, pipe, stages)}


def hooks(rank, world, name):
    """Calls of parameters' hooks in three steps, and of hooks of a stage's inputs."""
    model = linear_model(world)
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world)
    calls, seen = {"hook": [], "after": [], "input": []}, []
    parameter = next(stages[0].submod.parameters())
    parameter.register_hook(lambda grad: seen.append(grad.clone()) or calls["hook"].append(1))
    parameter.register_post_accumulate_grad_hook(lambda p: calls["after"].append(1))

    def watch(module, args):
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: calls["input"].append(1))

    stages[-1].submod[0].register_forward_pre_hook(watch)
    counts = []
    for x, y in batches(3, [4 * world]):
        pipe.zero_grad()
        model.zero_grad()
        run(schedule, stages, (x,), target=y)
        F.mse_loss(model(x), y).backward()
        counts.append([len(calls[kind]) for kind in calls])
        for kind in calls:
            calls[kind].clear()
    return {"counts": counts, "sum": torch.equal(seen[-1], parameter.grad), "is_first": stages[-1].is_first}


class Alive:
    """Counts the graphs and the outputs of a layer that are there."""

    def __init__(self):
        self.outputs, self.graphs, self.most = [], [], [0, 0]

    def look(self):
        self.outputs = [output for output in self.outputs if not output.expired()]
        self.graphs = [graph for graph in self.graphs if not graph.expired()]
        return len(self.outputs), len(self.graphs)

    def __call__(self, module, args, output):
        self.outputs.append(StorageWeakRef(output.untyped_storage()))
        self.graphs.append(StorageWeakRef(module.saved.untyped_storage()))
        module.saved = None
        self.most = [max(pair) for pair in zip(self.most, self.look(), strict=True)]


class Saving(nn.Module):
    """Its graph holds a tensor that nobody else has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.saved = None

    def forward(self, x):
        self.saved = torch.full_like(x, 2.0)
        return self.linear(x) * self.saved


def activations(rank, world, name, micro_batches):
    """The most graphs and outputs of the rank's last layer at a time, and what is left after a step."""
    model = nn.Sequential(*[Saving() for _ in range(2 * world)])
    _, schedule, stages = parallel(model, name, rank, world, micro_batches)
    alive = Alive()
    stages[0].submod[-1].register_forward_hook(alive)
    for x, y in batches(2, [4 * micro_batches]):
        run(schedule, stages, (x,), target=y, return_outputs=False)
    return {"most": alive.most, "left": alive.look()}


def random_numbers(rank, world, name, checkpoint):
    """Gradients beside those of a pipe in one process that was seeded alike, and the generators afterwards."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)) for _ in range(2 * world)]
    model = nn.Sequential(*layers)
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world, checkpoint=checkpoint)
    here = pymoe.Pipe(model, 2 * world, checkpoint, balance=[len(model) // len(pipe)] * len(pipe))
    worst = 0.0
    torch.manual_seed(7)
    states = [torch.get_rng_state(), torch.get_rng_state()]
    for x, y in batches(3, [4 * world + 1]):
        torch.set_rng_state(states[0])
        here.step(x, target=y, loss_fn=F.mse_loss)
        states[0] = torch.get_rng_state()
        torch.set_rng_state(states[1])
        run(schedule, stages, (x,), target=y)
        states[1] = torch.get_rng_state()
        worst = max(worst, compare(model, pipe, stages))
    return {"worst": worst, "alike": torch.equal(*states)}


def evaluation(rank, world, name):
    """Outputs of evaluation between training steps, and whether it leaves gradients alone."""
    model = linear_model(world)
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world)
    worst, first, last = 0.0, rank == 0, any(stage.is_last for stage in stages)
    for x, y in batches(3, [4 * world, 4 * world + 3]):
        F.mse_loss(model(x), y).backward()
        run(schedule, stages, (x,), target=y)
        before = {n: g.clone() for n, g in own_gradients(pipe, stages).items()}
        with torch.no_grad():
            expected = model(x)
        output = schedule.eval(*((x,) if first else ()), target=y if last else None)
        if output is not None:
            worst = max(worst, (output - expected).abs().max().item(), float(output.requires_grad))
        worst = max(worst, largest_difference(own_gradients(pipe, stages), before))
    return max(worst, compare(model, pipe, stages))


def loss_with_parameters(rank, world, name):
    """Gradients of a loss that has parameters, and the losses."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((WIDTH,), 1.5))

        def forward(self, output, target):
            return F.mse_loss(output * self.weight, target)

    model, loss, twin = linear_model(world), Loss(), Loss()
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world, loss_fn=twin)
    (x, y), *_ = batches(1, [4 * world + 1])
    loss(model(x), y).backward()
    _, losses = run(schedule, stages, (x,), target=y)
    worst = compare(model, pipe, stages)
    if losses is not None:
        worst = max(worst, (twin.weight.grad - loss.weight.grad).abs().max().item())
        parts = zip(x.tensor_split(2 * world), y.tensor_split(2 * world), strict=True)
        expected = torch.stack([loss(model(a), b).detach() for a, b in parts])
        worst = max(worst, (torch.stack(losses) - expected).abs().max().item())
    return worst


def checkpointing(rank, world, name, checkpoint):
    """How often layers run in a step, and the gradients."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), Counting()) for _ in range(2 * world)])
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world, checkpoint=checkpoint)
    (x, y), *_ = batches(1, [4 * world])
    F.mse_loss(model(x), y).backward()
    run(schedule, stages, (x,), target=y)
    return {"calls": stages[0].submod[0][1].calls, "worst": compare(model, pipe, stages)}


def buffers(rank, world):
    """The keys of state_dict before and after a step."""
    model = linear_model(world)
    model[0].register_buffer("kept", torch.ones(2))
    model[-1].register_buffer("not_kept", torch.ones(2), persistent=False)
    pipe, schedule, stages = parallel(model, "ScheduleGPipe", rank, world, world)
    (x, y), *_ = batches(1, [4 * world])
    run(schedule, stages, (x,), target=y)
    return [sorted(pipe.state_dict()), sorted(model.state_dict())]


class Own(nn.Module):
    """Returns a buffer, and changes it in the next forward; and a value that a stage beside it edits."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x):
        self.seen += x.detach().sum(0)
        return x, self.seen


class TakeBoth(nn.Module):
    def forward(self, both):
        return both[0] + both[1]


def buffers_on_their_way(rank, world, micro_batches):
    """Outputs, where a stage sends a buffer that its next forward changes."""
    model = nn.Sequential(Own(), *[nn.Identity() for _ in range(2 * world - 2)], TakeBoth())
    _, schedule, stages = parallel(model, "ScheduleGPipe", rank, world, micro_batches, loss_fn=None)
    worst = 0.0
    for x, _ in batches(3, [2 * micro_batches]):
        expected = torch.cat([model(part) for part in x.tensor_split(micro_batches)])
        output, _ = run(schedule, stages, (x,))
        if output is not None:
            worst = max(worst, (output - expected).abs().max().item())
    return worst


def compiled(rank, world, name):
    """Gradients, with layers that are compiled."""
    model = linear_model(world)
    pipe, schedule, stages = parallel(model, name, rank, world, 2 * world)
    for stage in stages:
        for layer in stage.submod:
            layer.compile(backend="aot_eager")
    for x, y in batches(2, [4 * world]):
        F.mse_loss(model(x), y).backward()
        run(schedule, stages, (x,), target=y)
    return compare(model, pipe, stages)


def replicas(rank, world, name):
    """Every rank has a whole pipe, each another half of the batch; DistributedDataParallel averages their gradients."""
    groups = [dist.new_group([one]) for one in range(world)]
    model = linear_model(world)
    pipe = pymoe.Pipe(copy.deepcopy(model), balance=[2, 2], checkpoint="never")
    schedule, stages = make(name, pipe, 0, 1, 4, F.mse_loss, group=groups[rank])
    for stage in stages:
        stage.submod = nn.parallel.DistributedDataParallel(stage.submod)
    worst = 0.0
    for x, y in batches(3, [8 * world]):
        model.zero_grad()
        pipe.zero_grad()
        F.mse_loss(model(x), y).backward()
        run(schedule, stages, (x.chunk(world)[rank],), target=y.chunk(world)[rank])
        worst = max(worst, compare(model, pipe, stages))
    return worst


def two_schedules(rank, world):
    """Schedules of several numbers of micro-batches take turns with the same stages."""
    model = linear_model(world)
    pipe, first, stages = parallel(model, "ScheduleGPipe", rank, world, world, checkpoint="except_last")
    from torch.distributed.pipelining import Schedule1F1B

    second = Schedule1F1B(stages[0], 3 * world, loss_fn=F.mse_loss)
    for schedule, (x, y) in zip([first, second] * 2, batches(4, [6 * world, 6 * world + 1]), strict=True):
        F.mse_loss(model(x), y).backward()
        run(schedule, stages, (x,), target=y)
    return compare(model, pipe, stages)


def wrong_stage(rank, world):
    """What a stage says that is not there."""
    pipe = pymoe.Pipe(linear_model(world), balance=[world, world])
    said = []
    for index in (-1, 2, True, "0"):
        try:
            pipe.build_stage(index, CPU)
        except ValueError as error:
            said.append(str(error))
    return said


def skips(rank, world, name):
    """Values that go to several stages, past others."""
    model = row_model()
    count = stages_of(name, world)
    pipe = pymoe.Pipe(
        copy.deepcopy(model), balance=[8 // count + (n < 8 % count) for n in range(count)], checkpoint="never"
    )
    schedule, stages = make(name, pipe, rank, world, 2 * world, F.mse_loss)
    (x, y), *_ = batches(1, [4 * world])
    F.mse_loss(model(x), y).backward()
    run(schedule, stages, (x,), target=y)
    return compare(model, pipe, stages)
