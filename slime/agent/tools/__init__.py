"""Tools for multi-turn generate functions: the tools that a model may call, and the outcomes of a call."""

from slime.agent.tools.environment import (
    ToolBox,
    ToolEnvironment,
    note_tool_calls,
    opening_messages,
    own_for_the_run,
    run_with_tools,
)
from slime.agent.tools.functions import FunctionTool
from slime.agent.tools.interpreter import PythonInterpreter
from slime.agent.tools.mcp import McpServer
from slime.agent.tools.tool import (
    Tool,
    ToolCounts,
    ToolError,
    ToolFailure,
    ToolLimits,
    ToolOutcome,
    ToolProvider,
    ToolRefusal,
    ToolResult,
)

__all__ = [
    "FunctionTool",
    "McpServer",
    "PythonInterpreter",
    "Tool",
    "ToolBox",
    "ToolCounts",
    "ToolEnvironment",
    "ToolError",
    "ToolFailure",
    "ToolLimits",
    "ToolOutcome",
    "ToolProvider",
    "ToolRefusal",
    "ToolResult",
    "note_tool_calls",
    "opening_messages",
    "own_for_the_run",
    "run_with_tools",
]
