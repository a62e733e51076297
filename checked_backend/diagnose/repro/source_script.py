"""Write a repro from the user's own function, for errors that Dynamo makes before there is a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from checked_backend.diagnose.repro.function_source import Source
from checked_backend.diagnose.repro.inputs_code import write_inputs
from checked_backend.diagnose.repro.repro import Repro, script_path, write_and_run
from checked_backend.diagnose.repro.script import BUG_GONE, BUG_THERE, Script, facts, safe
from checked_backend.diagnose.repro.translate import Untranslatable

__all__ = ["write_source_repro"]

_COMPARISON = f"""\
def flat(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, (list, tuple)) else [value]


def alike(one, other):
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and (isinstance(one, Exception) or one == other)
    same = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    return same and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


outcomes = []
for name, run in ("eager", {{function}}), ("compiled", compiled):
    inputs = make_inputs()
    try:
        outcomes.append(flat((run(*inputs), inputs)))
    except Exception as error:
        outcomes.append([error])
    print(f"{{{{name}}}}, results and then inputs:", repr(outcomes[-1])[:2000])
expected, actual = outcomes
wrong = len(expected) != len(actual) or not all(map(alike, expected, actual))
print("{BUG_THERE}" if wrong else "{BUG_GONE}")
raise SystemExit(int(wrong))
"""


def write_source_repro(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    folder: Path,
    *,
    name: str,
    title: str,
    source: str | None,
    dynamic: bool | None = None,
    timeout: float = 120,
) -> Repro:
    """Write a script with a function's own source, and run it from disk in a fresh process.

    The script compiles with ``backend="eager"``: an error there is Dynamo's, whatever compiles Dynamo's graph.

    Args:
        function: A plain function. It may refer to what `Source.add` allows.
        args: Its arguments: tensors and numbers.
        kwargs: Must be empty.
        name: The topic of the script, for its file name.
        title: What is wrong.
        source: The user's line.
        dynamic: As for ``torch.compile``.
        timeout: Seconds for a run.

    Returns:
        The script, and whether it showed the bug.

    Raises:
        Untranslatable: The function needs something that a script cannot make.
        OSError: The folder cannot be written to.
    """
    if kwargs:
        raise Untranslatable("it is called with keyword arguments")
    found = Source()
    own = found.add(function)
    inputs = write_inputs({f"x{place}": value for place, value in enumerate(args)} | found.tensors)
    path = script_path(folder, name)
    values = path.with_suffix(".safetensors").name
    making = [
        *([f'saved = load_file(__file__.rpartition("/")[0] + "/{values}")'] if inputs.saved else []),
        *inputs.lines,
    ]
    count = len(args)
    text = "\n".join(
        [
            f'"""{safe(title)[:200]}',
            "",
            *(safe(line) for line in (*facts(), *([f"Found at {source}"] if source else []))),
            "Exits 1 while the bug is there, 0 when it is gone.",
            '"""',
            "from __future__ import annotations",
            "",
            "import torch",
            *(["from safetensors.torch import load_file  # pip install safetensors"] if inputs.saved else []),
            *found.imports,
            "",
            "",
            "def make_inputs():",
            *(f"    {line}" for line in making),
            f"    return [{', '.join(inputs.values[:count])}]",
            "",
            "",
            *(f"{key} = {text}" for key, text in zip(found.tensors, inputs.values[count:], strict=True)),
            *found.lines,
            "",
            "torch.set_grad_enabled(False)",
            f'compiled = torch.compile({own}, backend="eager"{", dynamic=True" if dynamic else ""})',
            "",
            "",
            _COMPARISON.format(function=own),
        ]
    )
    return write_and_run(path, Script(text, inputs.saved), timeout)
