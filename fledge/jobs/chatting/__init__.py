"""Parts of `fledge chat`: the conversation, its session with an engine, the commands and the screen."""
