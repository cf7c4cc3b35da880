"""Sessions: the token-exact core of everything that talks to a model over several turns."""
