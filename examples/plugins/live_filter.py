"""Keep nothing with an e-mail address or a secret in it: --live-filter-path examples/plugins/live_filter.py"""

import re

from slime.agent.interaction import Exchange

PRIVATE = re.compile(r"[\w.+-]+@[\w-]+\.\w+|\b(?:sk|ghp|AKIA)[-_]?\w{16,}|password", re.IGNORECASE)


def live_filter(exchange: Exchange) -> bool:
    """True where no message of the whole conversation so far has such a thing in it."""
    return not any(PRIVATE.search(text) for text in exchange.texts())
