"""A report that can be pasted into an issue of the compiler's project: what is wrong, a script, versions, settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from checked_backend._torch.settings import changed_settings
from checked_backend.diagnose.repro.compile_code import matters
from checked_backend.findings import EvidenceKey, Finding, Kernel
from checked_backend.options import CheckOptions
from checked_backend.report.clean import fenced, plural
from checked_backend.report.details import kernel_words
from checked_backend.report.environment import environment
from checked_backend.report.write import write_whole

_SHOWN = "It was run from disk in a fresh process, and showed it."


def describe_candidate(options: CheckOptions, mode: str | None) -> dict[str, str]:
    """Describe the compiler of the candidate, in words.

    Returns:
        ``compiled by``; also ``mode``, ``options`` and ``settings`` (of torch, other than the defaults), if any.
    """
    settings = [
        f"{module}.{name} = {value!r}"
        for module, found in changed_settings().items()
        for name, value in found.items()
        if matters(name)
    ]
    found = {
        "compiled by": options.compiler_name,
        "mode": mode,
        "options": dict(options.compiler_options),
        "settings": settings,
    }
    return {name: str(value) for name, value in found.items() if value}


def write_bug_report(finding: Finding, candidate: Mapping[str, str], output: str) -> Path | None:
    """Write a finding next to its script, as Markdown.

    Raises:
        OSError: The script cannot be read, or the report cannot be written.
    """
    if finding.repro is None:
        return None
    script = Path(finding.repro)
    path = script.with_suffix(".md")
    wrong = finding.message.splitlines()[0] if finding.message else str(finding.kind)
    broken = finding.evidence.get(EvidenceKey.BROKEN_BY)
    known = ("graph", finding.graph), ("stage", finding.stage), ("broken by", broken), ("module", finding.module)
    where = [f"{key}: {value}" for key, value in known if value]
    lines = [
        f"# {candidate['compiled by']}: {finding.op or 'a graph'}: {finding.detail or finding.kind}",
        "",
        f"- {finding.subject}: {wrong}",
        *(f"- {item}" for item in where),
        *([f"- found at: `{finding.source}`"] if finding.source else []),
        "",
        "## Script",
        "",
        f"It exits 1 while the bug is there. {finding.evidence.get(EvidenceKey.REPRO, _SHOWN)}",
        *(
            [f"It reads `{script.with_suffix('.safetensors').name}`: attach that file."]
            if script.with_suffix(".safetensors").exists()
            else []
        ),
        "",
        fenced(script.read_text(encoding="utf-8").rstrip(), "python"),
        "",
        *(["It printed:", "", fenced(output.rstrip()), ""] if output else []),
        *(["## Workaround", "", fenced(finding.workaround.rstrip(), "python"), ""] if finding.workaround else []),
        *_generated(finding.kernel),
        "## What was tried",
        "",
        *(f"- {EvidenceKey.phrase_of(str(key))}: {value}" for key, value in finding.evidence.items()),
        "",
        "## Versions and settings",
        "",
        *(f"- {key}: {value}" for key, value in {**candidate, **environment()}.items()),
    ]
    write_whole("\n".join(lines) + "\n", path)
    return path


def _generated(kernel: Kernel | None) -> list[str]:
    if kernel is None:
        return []
    left_out = [f"And {plural(kernel.lines_left_out, 'more line')}.", ""] if kernel.lines_left_out else []
    language = "cpp" if kernel.language == "C++" else "python"
    code = fenced(kernel.code.rstrip(), language)
    return ["## Generated code", "", f"{kernel_words(kernel)}:", "", code, "", *left_out]
