"""Trainer and rollout backends, behind the two protocols of `rllaunch.backends.base`."""
