"""Equal work as loops: blocks that scan, optimizers over stacks, numbers in rows."""
