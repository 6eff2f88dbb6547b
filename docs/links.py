"""A hook of mkdocs, for what is written for readers of the repository and reads otherwise on the site.

Links to files of the repository, which no page of the site is, become their words. The heading of a rule gets the
rule's name beside its code, so that the table of contents says more than codes; links to it have its code as before.
"""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
    return re.sub(r"^## (RL\d+)\n\n\*\*(.+)\*\*$", _named, markdown, flags=re.MULTILINE)


def _named(rule: re.Match[str]) -> str:
    code, name = rule.groups()
    return f"## {code}: {name} {{ #{code.lower()} }}"
