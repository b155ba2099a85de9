"""What each command does, from its options (a frozen dataclass, which is also its flags) to its result."""
