"""Draft models: networks, key-value cache, initialization and checkpoint files."""
