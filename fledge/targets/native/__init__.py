"""fledge's own forward pass of dense Llama-like targets, with a preallocated cache and fused projections."""
