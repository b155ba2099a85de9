"""How drafts are written on disk: numbering of layers, speculators' config, and files and names of tensors."""
