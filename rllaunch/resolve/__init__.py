"""Stage 1, `rllaunch resolve`: layers of values with their origins become one frozen config."""
