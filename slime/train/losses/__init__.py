"""What is minimised: functions of response log-probs that know no model, rank or stage."""
