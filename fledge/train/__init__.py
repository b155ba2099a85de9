"""The training objectives, the optimizer and the training loop."""
