"""The folders of a dump: ``DIR/NAME/NAME_{kind}_{INDEX}/``, numbered without shared state and written atomically."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from checked_backend.errors import DumpError

__all__ = ["DumpSlot", "claim_slot"]

_CLAIMS = ".claims"


@dataclass(frozen=True, slots=True)
class DumpSlot:
    """One index of one name. The graphs of one region share it.

    Attributes:
        folder: ``DIR/NAME``.
        name: NAME.
        index: INDEX.
    """

    folder: Path
    name: str
    index: int

    def path(self, kind: str) -> Path:
        """Folder of the graph of this kind."""
        return self.folder / f"{self.name}_{kind}_{self.index}"

    def write(self, kind: str, fill: Callable[[Path], None]) -> Path:
        """Write a graph's folder atomically, so that no reader sees half of it.

        Args:
            kind: The graph kind: joint, forward, backward, inference, dynamo.
            fill: Writes the files into the folder that it gets.

        Returns:
            The finished folder.

        Raises:
            DumpError: The folder cannot be written.
        """
        target = self.path(kind)
        try:
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=self.folder))
            try:
                fill(temporary)
                temporary.chmod(0o755)  # mkdtemp makes folders that only the owner can read
                os.rename(temporary, target)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        except OSError as error:
            raise DumpError(
                f"cannot write the dump {target}: {error}. Set the option dump to another folder."
            ) from error
        return target

    def discard(self) -> None:
        """Remove the graphs of this index, and free the index. Files that cannot be removed stay."""
        for path in self.folder.glob(f"{self.name}_*_{self.index}"):
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            (self.folder / _CLAIMS / str(self.index)).unlink()


def claim_slot(root: Path, name: str) -> DumpSlot:
    """Claim the next free index of a name, also against other threads and processes.

    Args:
        root: The dump's folder, made if it does not exist.
        name: The name of the region. Characters that do not belong in a file name become ``_``.

    Raises:
        DumpError: The folder cannot be made.
    """
    safe = re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("._") or "graph"
    folder = root / safe
    claims = folder / _CLAIMS
    try:
        claims.mkdir(parents=True, exist_ok=True)
        index = _first_free(folder, safe)
        while True:
            with suppress(FileExistsError):
                # exclusive creation makes the claim; it lasts, because forward and backward come at different times
                os.close(os.open(claims / str(index), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                return DumpSlot(folder, safe, index)
            index += 1
    except OSError as error:
        raise DumpError(
            f"cannot make the dump folder {folder}: {error}. Set the option dump to another folder."
        ) from error


def _first_free(folder: Path, name: str) -> int:
    pattern = re.compile(re.escape(name) + r"_[a-z]+_(\d+)")
    used = [int(match[1]) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
    return max(used, default=-1) + 1
