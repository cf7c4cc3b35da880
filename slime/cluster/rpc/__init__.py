"""Calls between processes: connections, channels and message formats."""
