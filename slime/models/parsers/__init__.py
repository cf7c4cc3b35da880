"""What a model wrote, as reasoning, text and tool calls: one small parser for each format."""
