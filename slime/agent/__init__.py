"""Agents: sessions that hold the tokens, endpoints in front of them, sandboxes, harnesses and tools."""
