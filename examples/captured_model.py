"""Captures a model that is not a sequence, cuts it where its code says, and trains it in a pipeline.

python examples/captured_model.py
"""

if __name__ == "__main__":  # --help says what this is; there are no options
    import argparse

    argparse.ArgumentParser(description=__doc__).parse_args()

import torch
from torch import nn

import pymoe


class Matching(nn.Module):
    """Decides which of two sets of points is wider. Its two branches share an encoder, and the skip is part of its
    code.
    """

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128))
        self.mixer = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128), nn.Dropout(0.1))
        self.head = nn.Linear(256, 2)

    def forward(self, left, right, *, scale=1.0):
        a, b = self.encoder(left * scale).amax(1), self.encoder(right * scale).amax(1)
        pymoe.pipe_split()
        mixed = self.mixer(torch.cat([a, b], dim=1))
        pymoe.pipe_split()
        return {"logits": self.head(torch.cat([mixed, a - b], dim=1)), "codes": (a, b)}


def points(rows):
    widths = torch.rand(2, rows, 1, 1) + 0.5
    left, right = torch.randn(2, rows, 12, 2) * widths
    return left, right, (widths[1] > widths[0]).long().flatten()


torch.manual_seed(0)
torch.set_num_threads(1)  # one thread for each stage
model = Matching()
left, right, _ = points(4)
pipe = pymoe.pipeline(model, (left, right), {"scale": 0.5}, chunks=4)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)

for step in range(101):
    left, right, wider = points(126)  # 32, 32, 31 and 31 rows
    losses = pipe.step(
        left, right, scale=0.5, target=wider, loss_fn=lambda out, y: nn.functional.cross_entropy(out["logits"], y)
    )
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        print(f"step {step:3d}  loss {losses.mean().item():.3f}")

pipe.eval()
left, right, wider = points(1000)
right_answers = (pipe(left, right, scale=0.5)["logits"].argmax(1) == wider).float().mean().item()
print(f"\n{right_answers:.0%} of new pairs are right\n{pipe.info()}")
