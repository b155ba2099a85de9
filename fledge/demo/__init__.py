"""What `fledge demo` copies: the assistant, its draft, conversations to train on, and prompts to measure on."""
