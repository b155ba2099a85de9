"""From chats and texts to packed rows: reading, templates and spans, windows, packing, vocabulary, regeneration."""
