"""``python -m checked_backend``."""

from __future__ import annotations

from checked_backend.cli import main

if __name__ == "__main__":
    main()
