"""The site reads pages as GitHub does, and can be read from a disk.

A list, a table or a code block may follow a paragraph without a blank line; the logo leads to a page, not to a folder.
"""

import re

_FENCE = re.compile(r"^\s*```")
_ITEM = re.compile(r"^(?:[-*]|\d+\.) ")
_COMMENT = re.compile(r"^<!--.*-->$")
_LOGO = re.compile(r'<a href="([./]+)"([^>]*\bmd-logo\b)')


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the blank lines that Python-Markdown needs before lists and around comments; leave code blocks alone."""
    lines: list[str] = []
    inside = False
    for line in markdown.splitlines():
        above = lines[-1] if lines else ""
        if not inside and above.strip() and _needs_space(above, line):
            lines.append("")
        if _FENCE.match(line):
            inside = not inside
        lines.append(line)
    return "\n".join(lines) + "\n"


def _needs_space(above: str, line: str) -> bool:
    if _COMMENT.match(above) or _COMMENT.match(line):
        return True
    starts_list = _ITEM.match(line) and not _ITEM.match(above) and not above.startswith(" ")
    return bool(starts_list)


def on_post_page(output: str, **_: object) -> str:
    """Let the logo lead to the first page by its file's name: from a disk a folder would be listed."""
    return _LOGO.sub(lambda found: f'<a href="{found[1].rstrip("/")}/index.html"{found[2]}', output)
