"""Upstream slime's adapters: endpoints for agents in the process that generates, over sessions that hold the tokens.

New code opens its sessions with `slime.agent.remote_session.open_session`: these do not wait at the gate of a run, and end with
the process they are in.
"""

from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.base import BaseAdapter
from slime.agent.adapters.openai import OpenAIAdapter

__all__ = ["AnthropicAdapter", "BaseAdapter", "OpenAIAdapter"]
