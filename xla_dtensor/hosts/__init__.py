"""Jobs of several processes: how they meet, their data, checkpoints, weights, preemption."""
