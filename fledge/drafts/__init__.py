"""The draft model, its key-value cache, its initialization and its checkpoint files."""
