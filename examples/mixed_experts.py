"""pymoe.MixtureOfExpertBackends: a gate over three served experts, one of which is gone for half of the training."""

if __name__ == "__main__":  # --help says what this is; there are no options
    import argparse

    argparse.ArgumentParser(description=__doc__).parse_args()

import torch
from torch import nn

import pymoe

torch.manual_seed(0)


def served_expert(name):
    expert = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 8))
    return pymoe.ExpertBackend(
        name, expert, torch.optim.Adam(expert.parameters(), 3e-3), args_schema=[pymoe.BatchTensorProto(8)]
    )


backends = [served_expert(name) for name in ("first", "second", "third")]
mixture = pymoe.MixtureOfExpertBackends(backends, top_k=2, forward_timeout=5, backward_timeout=5, max_experts=4)
optimizer = torch.optim.Adam(mixture.parameters(), 3e-3)  # for the gate; each expert has its own optimizer

with pymoe.Runtime(backends, num_workers=2) as runtime:
    for step in range(301):
        if step == 100:
            runtime.remove(backends[1], drain=False)  # "second" is dead, and the mixture is not notified
        if step == 200:
            backends.append(served_expert("fourth"))
            runtime.add(backends[-1])
            mixture.replace_backend("second", backends[-1])
        x = torch.randn(64, 8)
        loss = nn.functional.mse_loss(mixture(x), x.sort(dim=1).values)  # learn to sort
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")

for name, stats in mixture.stats().items():
    print(f"{name}: {stats.forward.answered} of {stats.forward.requests} requests answered")
