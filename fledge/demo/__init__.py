"""The demo: its model and draft, its text, and the programs that made the pair."""
