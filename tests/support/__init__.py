"""Helpers that tests share: tiny models, small data, and plain definitions to compare results with."""
