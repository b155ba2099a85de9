"""Engines other than fledge's that serve drafts: the drafts that each engine supports, and each engine's file formats
and layer numbering."""
