"""The process in front of the engines: the endpoints that agents talk to, and the sessions behind them."""
