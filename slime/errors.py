"""The two errors of a run that are not bugs; the command line prints their message without a traceback."""


class UserError(Exception):
    """An error that the user can fix; its message says what is wrong, where, and what to do. Exit code 2."""


class RunFailed(Exception):
    """A failure that ends the run. Its message names the process, its action, and the log to read. Exit code 1."""
