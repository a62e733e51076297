"""The hook that starts the checks in every Python of an environment: two files in its site-packages."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from pathlib import Path

from checked_backend.errors import CheckedBackendError
from checked_backend.report.write import write_whole

FILES: Mapping[str, str] = {
    "checked_backend.pth": (
        'import os; os.environ.get("CHECKED_BACKEND", "0") not in ("", "0") and '
        '__import__("checked_backend.autostart").autostart.start()\n'
    ),
    "checked_backend.start": "checked_backend.autostart:start\n",
}
"""The text of each file. From Python 3.15 on the second counts, and 3.18 ignores imports in the first (PEP 829)."""


def site_packages() -> Path:
    """The folder of this environment in which Python looks for hooks when it starts."""
    return Path(sysconfig.get_path("purelib"))


def missing_files() -> list[str]:
    """The files of the hook that are not there, or have another text."""
    return [name for name, text in FILES.items() if _text(site_packages() / name) != text]


def install_hook() -> None:
    """Write the files.

    A CheckedBackendError is raised if somebody else's file has the name of one, an OSError if one cannot be written.
    """
    _refuse_others()
    for name in missing_files():
        write_whole(FILES[name], site_packages() / name)


def remove_hook() -> None:
    """Remove the files; it raises as `install_hook` does."""
    _refuse_others()
    for name in FILES:
        (site_packages() / name).unlink(missing_ok=True)


def _refuse_others() -> None:
    for path in (site_packages() / name for name in FILES):
        if _text(path) not in (None, FILES[path.name]):
            raise CheckedBackendError(f"{path}: checked-backend has not written this, so it leaves it as it is")


def _text(path: Path) -> str | None:
    return path.read_text("utf-8", errors="replace") if path.exists() else None
