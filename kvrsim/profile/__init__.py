"""CalibrationProfile: what a machine and its software were measured to reach."""
