"""Parts of `fledge chat`: the session with an engine, the screen, and the tints."""
