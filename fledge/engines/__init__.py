"""Other engines that serve drafts: what each of them supports, and the files and numbering that it reads."""
