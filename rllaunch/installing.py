"""What to type for more of rllaunch. It is on no package index: extras and its own plugins come from the clone."""

from __future__ import annotations


def extra(name: str) -> str:
    """The line that installs what an extra of rllaunch asks for."""
    return f"`pip install -e '.[{name}]'` in the clone of rllaunch"


def plugin(name: str) -> str:
    """The line that installs a plugin of rllaunch's own repository."""
    return f"`pip install plugins/{name}` in the clone of rllaunch"
