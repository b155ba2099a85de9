"""The target's hidden states of training documents on disk: written once, and read by many training runs."""
