"""The one exception that means "the user can fix this": its text is a single sentence with the remedy, and the
command line turns it into exit code 2 without a traceback."""


class UserError(Exception):
    """What is wrong, where, and what to do about it, in one sentence."""
