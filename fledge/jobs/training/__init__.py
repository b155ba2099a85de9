"""The parts of `fledge train`: the recipe and its file, then a module for each thing that a run sets up."""
