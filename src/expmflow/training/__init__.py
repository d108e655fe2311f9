"""Training: configs, the loop, checkpoints, many processes."""
