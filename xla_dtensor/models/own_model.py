"""A template for a model of your own: ``python -m xla_dtensor plan JOB --model my_file:training``.

The function is called with the job; ``training.py`` says what it returns. Write sharding rules for
your parameters' names in the job file.
"""

import torch
from torch import nn


def training(job):
    """Returns the model, what makes its step, and the inputs with their placements."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)).bfloat16()
        inputs = torch.empty(job.topology().num_devices, 512, 4096, dtype=torch.bfloat16)

    def make_step(model, mesh):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(x):
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return model, make_step, (inputs,), ((job.axis_names, None, None),)
