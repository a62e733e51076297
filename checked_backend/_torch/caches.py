"""The caches of compilers, in memory and on disk."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config


@contextmanager
def without_compile_caches() -> Iterator[None]:
    """Compile every graph anew. The key of a cached graph is its text, which stays the same if a compiler is patched.

    C++ kernels stay cached: their key is their whole source and the command that compiles it.
    """
    from torch._functorch import config as functorch  # noqa: PLC0415  slow to import
    from torch._inductor import config as inductor  # noqa: PLC0415

    changes: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (
            inductor,
            (
                "fx_graph_cache",
                "fx_graph_remote_cache",
                "autotune_local_cache",
                "autotune_remote_cache",
                "bundled_autotune_remote_cache",
            ),
        ),
        (functorch, ("enable_autograd_cache", "enable_remote_autograd_cache")),
        (torch._dynamo.config, ("automatic_dynamic_local_pgo", "automatic_dynamic_remote_pgo")),
    )
    with ExitStack() as stack:
        for module, names in changes:
            stack.enter_context(module.patch({name: False for name in names if hasattr(module, name)}))
        yield


def compile_cache_folder() -> Path | None:
    """The folder in which torch keeps what it compiled, until the user empties it; None if it keeps no graphs there."""
    from torch._inductor import config as inductor  # noqa: PLC0415  slow to import
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # noqa: PLC0415

    kept = inductor.fx_graph_cache and not inductor.force_disable_caches
    return Path(cache_dir()) if kept else None


@contextmanager
def fresh_compile_caches(*, kept: bool = False) -> Iterator[None]:
    """Compile everything anew, kernels too, with an empty folder as cache and with empty caches in memory.

    Inductor also remembers which vector instructions work here, and uses cached files to find out; it forgets that too.
    Precompiled headers are off, because they lie in another folder.

    Args:
        kept: Keep the folder until the process ends: what was compiled may load more files from it.

    Raises:
        OSError: No folder can be made.
    """
    from torch._inductor import config as inductor  # noqa: PLC0415  Inductor is slow to import
    from torch._inductor import cpu_vec_isa  # noqa: PLC0415
    from torch._inductor.utils import clear_inductor_caches  # noqa: PLC0415

    def forget() -> None:
        clear_inductor_caches()
        homes = [kind for kind in vars(cpu_vec_isa).values() if isinstance(kind, type)]
        for home in (cpu_vec_isa, *homes):
            for function in list(vars(home).values()):
                clear = getattr(function, "cache_clear", None)
                if clear is not None:
                    clear()

    folder, owner = tempfile.mkdtemp(prefix="checked_backend_cache_"), os.getpid()
    places = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder, "triton"))}
    before = {name: os.environ.get(name) for name in places}
    forget()
    os.environ.update(places)
    try:
        with without_compile_caches(), inductor.patch({"cpp_cache_precompile_headers": False}):
            yield
    except BaseException:
        kept = False  # nothing was compiled that could load more
        raise
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        forget()
        if kept:
            atexit.register(_remove, folder, owner)
        else:
            _remove(folder, owner)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked process that ends does not own it
        shutil.rmtree(folder, ignore_errors=True)
