"""A python interpreter as a tool: each call is a process of its own with limits on time and memory."""

import ast
import asyncio
import os
import sys
import tempfile
import textwrap

TOOL_CONFIGS = {
    "max_turns": 4,
    "max_tool_calls": 4,
    "tool_concurrency": 2,
    "python_timeout": 20,
    "python_memory_limit_mb": 2048,
}

SEMAPHORE = asyncio.Semaphore(TOOL_CONFIGS["tool_concurrency"])
FORBIDDEN_MODULES = {"os", "subprocess", "shutil", "socket", "sys"}


class PythonSandbox:
    def __init__(self, timeout=20, memory_limit_mb=2048):
        self.timeout = timeout
        self.memory_limit_mb = memory_limit_mb

    def check_code_safety(self, code):
        try:
            tree = ast.parse(code)
        except SyntaxError as error:
            return False, f"SyntaxError: {error.msg}"
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                if name.split(".")[0] in FORBIDDEN_MODULES:
                    return False, f"Import of {name} is not allowed"
        return True, ""

    def write_script(self, folder, script):
        path = os.path.join(folder, "code.py")
        with open(path, "w") as file:
            file.write(script)
        return path

    async def execute_code(self, code):
        is_safe, message = self.check_code_safety(code)
        if not is_safe:
            return f"Error: {message}"
        limit = self.memory_limit_mb * 1024 * 1024
        script = f"import resource\nresource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n" + textwrap.dedent(
            code
        )
        with tempfile.TemporaryDirectory() as folder:
            path = self.write_script(folder, script)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                path,
                cwd=folder,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                out, err = await asyncio.wait_for(process.communicate(), self.timeout)
            except TimeoutError:
                process.kill()
                await process.wait()
                return f"Error: execution timed out after {self.timeout} seconds"
        if process.returncode != 0:
            return f"Error: {err.decode().strip().splitlines()[-1]}"
        return out.decode().strip()


class ToolRegistry:
    def __init__(self):
        self.tools = {}
        self.python_sandbox = PythonSandbox(
            timeout=TOOL_CONFIGS["python_timeout"], memory_limit_mb=TOOL_CONFIGS["python_memory_limit_mb"]
        )
        self.register_tool(
            "code_interpreter",
            {
                "type": "function",
                "function": {
                    "name": "code_interpreter",
                    "description": "A tool for executing code.",
                    "parameters": {
                        "type": "object",
                        "properties": {"code": {"type": "string", "description": "The code to execute."}},
                        "required": ["code"],
                    },
                },
            },
        )

    def register_tool(self, name, tool_spec):
        self.tools[name] = tool_spec

    def get_tool_specs(self):
        return list(self.tools.values())

    async def execute_tool(self, tool_name, arguments):
        if tool_name not in self.tools:
            return f"Error: Tool '{tool_name}' not found"
        code = arguments.get("code", "")
        if not code.strip():
            return "Error: No code provided"
        async with SEMAPHORE:
            return await self.python_sandbox.execute_code(code)


tool_registry = ToolRegistry()
