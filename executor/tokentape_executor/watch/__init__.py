"""The command `tokentape-watch`: a tape in a terminal, while it is recorded or after."""
