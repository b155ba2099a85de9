"""The decode loop: propose, verify, commit."""
