"""A draft's model card, and its upload to a hub."""
