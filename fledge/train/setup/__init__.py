"""The parts of `fledge train`: the recipe, its file, and one module for each component of a run."""
