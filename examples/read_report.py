"""Read reports in a program: what failed, where, how far off, and what was not checked.

Run it as ``python examples/read_report.py [FOLDER]`` on a folder of reports, for example after ``checked-backend run``.
"""

import sys
from pathlib import Path

import checked_backend as cb


def main(folder: Path) -> list[str]:
    """One line for each failing finding, and for each thing that was not checked and matters."""
    lines = []
    for file in sorted(folder.rglob("*.json")):
        try:
            report = cb.Report.from_json(file.read_text("utf-8"))
        except (cb.CheckedBackendError, ValueError):
            continue  # other files lie beside reports
        for finding in report.findings:
            if finding.fails:
                off = "" if finding.metrics is None else f", off by {finding.metrics.max_abs_diff:.3g}"
                place = finding.source or finding.region
                lines.append(f"{file.name}: {finding.kind} {finding.subject} at {place}{off}")
        lines += [f"{file.name}: not checked: {skip.subject}" for skip in report.coverage.skipped if skip.matters]
    return lines


if __name__ == "__main__":
    print("\n".join(main(Path(sys.argv[1] if len(sys.argv) > 1 else "checked_backend_reports"))))
