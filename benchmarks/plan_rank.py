"""Program of each rank in `benchmarks/plan.py hosts`, started by torchrun. The ranks train linear layers, and rank 0 prints the time of a
step.

Usage: benchmarks/plan_rank.py SERVERS LAYERS STEPS
"""

import json
import statistics
import sys
import time

import torch
from torch import distributed, nn

import longshore

WIDTH = 1024


def main():
    servers, layers, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    optimizer = longshore.AdamW(model.named_parameters(), lr=1e-4, servers=servers, job="hosts", partition="reduce-scatter")
    torch.manual_seed(distributed.get_rank())  # the same model on all ranks, with different batches
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        model(torch.randn(8, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        distributed.barrier()
        times.append(time.perf_counter() - start)
    optimizer.close()
    if distributed.get_rank() == 0:
        print(json.dumps({"step_s": statistics.median(times[1:])}))  # the first step opens the job
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
