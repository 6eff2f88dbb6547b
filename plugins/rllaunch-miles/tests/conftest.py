from rllaunch.testing import rllaunch_project

__all__ = ["rllaunch_project"]
