"""The RL maths as torch functions and modules: no devices, no processes, no configuration."""
