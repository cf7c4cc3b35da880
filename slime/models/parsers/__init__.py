"""Parsers of model output into reasoning, text and tool calls, one small parser for each format."""
