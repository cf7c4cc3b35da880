"""The routes: from bytes on a socket to sequences and commands, and back."""
