"""pymoe.nn.MoE in place of a dense feed-forward network: 15 lines of training code."""

if __name__ == "__main__":  # --help says what this is; there are no options
    import argparse

    argparse.ArgumentParser(description=__doc__).parse_args()

import torch
from torch import nn

from pymoe.nn import MoE, update_expert_biases

torch.manual_seed(0)
moe = MoE(hidden_size=64, ffn_size=128, num_experts=8, top_k=2, bias_update_rate=0.001, z_loss_coef=0.001)
model = nn.Sequential(nn.Linear(8, 64), moe, nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(151):
    x = torch.randn(512, 8)
    loss = nn.functional.mse_loss(model(x), x.sort(dim=1).values)  # learn to sort
    optimizer.zero_grad()
    loss.backward()  # includes the gradient of the router's z loss
    optimizer.step()
    update_expert_biases(model)  # keeps the experts equally busy, without an auxiliary loss
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}  tokens per expert {moe.stats.load.tolist()}")
