"""External engines that serve drafts: the drafts that an engine supports, and an engine's files and layer numbering."""
