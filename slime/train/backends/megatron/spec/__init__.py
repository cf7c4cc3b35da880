"""Transformer layers in plain torch with Transformer Engine's parameter names, and the choice between both."""
