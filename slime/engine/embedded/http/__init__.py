"""The HTTP routes: parse requests into sequences and commands, and write their answers."""
