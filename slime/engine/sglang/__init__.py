"""SGLang servers and sglang-router as released, started as processes of their own.

Nothing here imports sglang: the interpreter that has it may be another one (`--sglang-python`), and is asked.
"""
