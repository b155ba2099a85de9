"""The target's hidden states of training documents on disk: written once, and read by every training that uses them."""
