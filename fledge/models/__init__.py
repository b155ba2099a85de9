"""Draft and target models, their caches and their files. Parallelism and compilation are put on from outside."""
