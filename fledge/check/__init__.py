"""Compares a draft with the probe that training stored beside it."""
