"""pymoe.Pipe: a model with a skip and batch norms, cut into two stages by time, and one step of it as it went."""

if __name__ == "__main__":  # --help says what this is; there are no options
    import argparse

    argparse.ArgumentParser(description=__doc__).parse_args()

import torch
from torch import nn

import pymoe
from pymoe.pipe.balance import balance_by_time
from pymoe.pipe.schedules import text
from pymoe.pipe.skip import pop, skippable, stash


@skippable(stash=["input"])
class Remember(nn.Module):
    def forward(self, x):
        yield stash("input", x)
        return x


@skippable(pop=["input"])
class Recall(nn.Module):
    def forward(self, x):
        return torch.cat([x, (yield pop("input"))], dim=1)


def block(inputs):
    return nn.Sequential(nn.Linear(inputs, 256), nn.BatchNorm1d(256), nn.ReLU())


torch.manual_seed(0)
torch.set_num_threads(1)  # one thread for each stage
model = nn.Sequential(Remember(), block(8), block(256), block(256), Recall(), block(264), nn.Linear(256, 8))
balance = balance_by_time(2, model, torch.randn(64, 8), timeout=0.2)
pipe = pymoe.Pipe(model, chunks=8, checkpoint="never", deferred_batch_norm=True, balance=balance)
optimizer = torch.optim.Adam(model.parameters(), 3e-3)

for step in range(101):
    x = torch.randn(512, 8)
    losses = pipe.step(x, target=x.sort(dim=1).values, loss_fn=nn.functional.mse_loss)  # learn to sort
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        print(f"step {step:3d}  loss {losses.mean().item():.3f}")

print(f"\n{len(pipe)} stages of {balance} layers; {pipe.last_run.summary()}\n{text(pipe.last_run, width=120)}")
