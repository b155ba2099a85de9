"""Evaluation of drafts: decodes prompts with and without a draft, and compares speed and output."""
