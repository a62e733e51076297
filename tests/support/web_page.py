"""A web page that runs scripts, in headless Chromium: what it shows as text once it is there."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.browser import BROWSER

__all__ = ["shown_text"]

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--no-proxy-server",
)


def shown_text(url: str, wanted: str, folder: Path, *, seconds: float = 120.0) -> str:
    """Open a page and wait until some text is there.

    Args:
        url: The page.
        wanted: The text.
        folder: Where the browser keeps its profile.
        seconds: How long to wait for it.

    Returns:
        All text of the page, as far as it was there in that time.
    """
    until, text = time.monotonic() + seconds, ""
    with _browser(folder) as ask:
        target = ask("Target.createTarget", url=url)["targetId"]
        session = ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        while wanted not in text and time.monotonic() < until:
            time.sleep(1)
            answer = ask("Runtime.evaluate", session, expression="document.body.innerText", returnByValue=True)
            text = str(answer.get("result", {}).get("value", ""))  # an error while the page is being loaded
    return text


@contextlib.contextmanager
def _browser(folder: Path) -> Iterator[Any]:
    """Start the browser; gives a function that asks it something over a pipe, and waits for the answer."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    words = [str(BROWSER), *_FLAGS, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe"]
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *words]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(shell, pass_fds=(theirs_in, theirs_out), stdout=quiet, stderr=quiet) as process:
        os.close(theirs_in)
        os.close(theirs_out)
        kept, asked = b"", 0

        def ask(method: str, session: str = "", **parameters: Any) -> Any:
            nonlocal kept, asked
            asked += 1
            question = {"id": asked, "method": method, "params": parameters}
            os.write(ours_out, json.dumps({**question, **({"sessionId": session} if session else {})}).encode() + b"\0")
            while True:
                while b"\0" in kept:
                    message, _, kept = kept.partition(b"\0")
                    answer = json.loads(message)
                    if answer.get("id") == asked:
                        return answer.get("result", {})
                if not select.select([ours_in], [], [], 60)[0]:
                    raise TimeoutError(method)
                kept += os.read(ours_in, 1 << 20)

        try:
            yield ask
        finally:
            process.terminate()
            os.close(ours_in)
            os.close(ours_out)
