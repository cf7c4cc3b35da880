"""Who asks the engines for a session's turns, and one turn from request to record."""
