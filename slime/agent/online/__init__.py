"""A model that serves real clients and learns from their conversations (docs/agents.md, "A live service")."""
