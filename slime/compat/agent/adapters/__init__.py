"""Upstream slime's adapters: agent endpoints in the generating process, with sessions that store the tokens.

New code opens its sessions with `slime.agent.remote_session.open_session`. The sessions here do not wait at the
dispatch gate of a run, and end with their process.
"""

from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.base import BaseAdapter
from slime.agent.adapters.openai import OpenAIAdapter

__all__ = ["AnthropicAdapter", "BaseAdapter", "OpenAIAdapter"]
