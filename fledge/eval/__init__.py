"""What a draft gains: prompts decoded with and without it, in one run, and figures that are sums divided once."""
