"""fledge's own forward pass of Llama-like targets, also with experts: a preallocated cache and fused projections."""
