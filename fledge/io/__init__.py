"""Files, the hub, HTTP, the terminal and the machine; and how drafts are written on disk."""
