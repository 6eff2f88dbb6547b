"""Stage 3, `rllaunch doctor`: rules over the resolved launch, every finding at once."""
