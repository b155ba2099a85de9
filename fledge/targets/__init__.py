"""Target models: the interface that training and decoding use, and its implementation for transformers models."""
