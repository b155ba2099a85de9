"""The jobs behind the commands: a module per command, with its options (a frozen dataclass) and its `run` function."""
