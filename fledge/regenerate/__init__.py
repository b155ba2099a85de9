"""Replacing the assistant's answers in data by the target's own: the loop, what answers, the check, the output file."""
