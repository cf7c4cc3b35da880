"""The engine contract (SGLang's HTTP dialect) and everything that speaks it."""
