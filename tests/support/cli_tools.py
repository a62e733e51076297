"""The command line, called in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from checked_backend.cli import verbs as cli

Run = Callable[..., tuple[int, str, str]]
"""Takes words; returns the exit code, and what was printed to stdout and stderr."""


def runner(capsys: pytest.CaptureFixture[str]) -> Run:
    """What runs ``checked-backend`` with some words."""

    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run
