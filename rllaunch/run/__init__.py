"""Stage 4, `rllaunch train`: Ray actors, the loop over the schedule, the run directory."""
