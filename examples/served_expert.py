"""pymoe.ExpertBackend: one expert, a training loop and other clients, whose requests meet in batches."""

if __name__ == "__main__":  # --help says what this is; there are no options
    import argparse

    argparse.ArgumentParser(description=__doc__).parse_args()

import threading

import torch
from torch import nn

import pymoe
from pymoe.runtime import ExpertClient

torch.manual_seed(0)
expert = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 8))
backend = pymoe.ExpertBackend(
    "sorter", expert, torch.optim.Adam(expert.parameters(), 3e-3), args_schema=[pymoe.BatchTensorProto(8)]
)

with pymoe.Runtime([backend]) as runtime:
    served = ExpertClient(backend)  # a module without parameters: the expert is updated on the server's side

    def train():
        for step in range(301):
            x = torch.randn(64, 8)
            loss = nn.functional.mse_loss(served(x), x.sort(dim=1).values)  # learn to sort
            loss.backward()  # a request for gradients, and with it an update of the expert
            if step % 100 == 0:
                print(f"step {step:3d}  loss {loss.item():.3f}")

    trainer = threading.Thread(target=train)
    trainer.start()
    while trainer.is_alive():
        rows = [backend.forward_pool.submit_task(torch.randn(1, 8)) for _ in range(16)]  # these meet in a batch
        answers = [future.result() for future in rows]
    trainer.join()

    for name, stats in runtime.stats().items():
        print(f"{name}: {stats.completed} requests, batches of {stats.mean_batch_size:.1f} rows")
