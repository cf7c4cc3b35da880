"""The two ways a run ends that are not bugs, and what the command line makes of them (no traceback from below)."""


class UserError(Exception):
    """The user can fix this: what is wrong, where, and what to do about it, in one sentence. Exit code 2."""


class RunFailed(Exception):
    """The run cannot go on: who failed, doing what, and where to look. Exit code 1."""
