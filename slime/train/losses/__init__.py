"""Losses: functions of response log-probs, independent of model, rank and pipeline stage."""
