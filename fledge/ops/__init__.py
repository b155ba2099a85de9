"""Compute kernels. Each Triton kernel is tested against a definition in plain torch, for values and gradients."""
