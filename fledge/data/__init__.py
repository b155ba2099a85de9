"""Training data: reading files and hub data sets, chat templates, tokenizing and its cache, packing and the draft
vocabulary."""
