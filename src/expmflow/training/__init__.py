"""The engine of training: configs, the loop, checkpoints, many processes."""
