"""The agent server: a process in front of the engines with the endpoints for agents and the sessions behind them."""
