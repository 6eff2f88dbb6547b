"""Stage 2, `rllaunch plan`: the handoff schedule and the bytes of every step."""
