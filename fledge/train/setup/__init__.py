"""The parts of `fledge train`: the recipe, the recipe file, and a module for each component of a run."""
