"""Training data: reading files and hub data sets, chat templates, windows, packing and the draft vocabulary."""
