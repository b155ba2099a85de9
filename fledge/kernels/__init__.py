"""Pure tensor functions. Each stands beside its definition in plain torch, the oracle for values and gradients."""
