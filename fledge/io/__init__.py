"""How drafts are written on disk: numbering of layers, speculators' config, fields that engines read and fledge
refuses, and files and names of tensors."""
