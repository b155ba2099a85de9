"""Replaces the assistant's answers in data by the target's own: the loop, the answerers, the check, the output file."""
