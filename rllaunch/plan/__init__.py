"""Stage 2: the handoff schedule as data, its checker, and the bytes of every step."""
