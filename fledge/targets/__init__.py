"""Target models: the interface for training and decoding, and implementations for transformers models."""
