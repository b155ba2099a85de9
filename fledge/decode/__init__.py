"""Speculative decoding: propose, verify, commit."""
