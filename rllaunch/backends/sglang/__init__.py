"""SGLang as the rollout engine: each engine in a process of its own, behind `rllaunch.backends.base.RolloutEngine`."""
