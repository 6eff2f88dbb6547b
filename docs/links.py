"""A hook of mkdocs: links to files of the repository, which no page of the site is, become their words."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", markdown)
