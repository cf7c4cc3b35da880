"""Released SGLang servers and sglang-router, started as separate processes.

Nothing here imports sglang: it may be installed in another interpreter (`--sglang-python`), which is queried.
"""
