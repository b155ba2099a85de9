"""Objectives and the loop that minimises them."""
