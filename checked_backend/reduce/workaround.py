"""Settings that make a finding vanish: a table, tried one by one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from checked_backend._torch import inductor_settings
from checked_backend.record import Kind
from checked_backend.reduce.judge import Judge, judge_trial
from checked_backend.regions.trial import Trial

__all__ = ["SETTINGS", "Setting", "Workaround", "find_workaround", "still_helps"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Something that a person can set.

    Attributes:
        name: What it turns off, for people.
        patches: Inductor's config patches.
    """

    name: str
    patches: Mapping[str, Any] = field(default_factory=dict)

    def code(self) -> str:
        """What to paste."""
        return f"torch.compile(model, options={dict(self.patches)!r})"


SETTINGS: Sequence[Setting] = (
    Setting("emulate eager's casts", {"emulate_precision_casts": True}),
    Setting("no pattern matcher", {"pattern_matcher": False}),
    Setting("no epilogue fusion", {"epilogue_fusion": False}),
    Setting("no constant folding", {"joint_graph_constant_folding": False}),
    Setting("no floating-point contraction", {"cpp.enable_floating_point_contract_flag": "off"}),
    Setting("no unsafe math", {"cpp.enable_unsafe_math_opt_flag": False}),
    Setting("no vectorization", {"cpp.simdlen": 1}),
    Setting("no layout optimization", {"layout_optimization": False}),
)


@dataclass(frozen=True, slots=True)
class Workaround:
    """A setting that made a finding vanish.

    Attributes:
        setting: The setting.
        code: What to paste.
    """

    setting: Setting
    code: str


def find_workaround(
    trial: Trial,
    *,
    subject: str,
    kind: Kind,
    deadline: float,
    settings: Sequence[Setting] = SETTINGS,
    judge: Judge = judge_trial,
) -> Workaround | None:
    """Try settings on a small program that goes wrong.

    Args:
        trial: The program.
        subject: Its wrong result.
        kind: The kind of the finding.
        deadline: A `time.monotonic` moment.
        settings: What to try, in this order.
        judge: Judges one trial, for tests.

    Returns:
        The first setting that makes the finding vanish; None if none does, or the compiler is not Inductor.
    """
    if trial.options.compiler != "inductor":
        return None
    known = inductor_settings()
    for setting in settings:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        if setting.patches.keys() <= known.keys() and still_helps(
            setting, trial, subject=subject, kind=kind, timeout=left, judge=judge
        ):
            return Workaround(setting, setting.code())
    return None


def still_helps(
    setting: Setting, trial: Trial, *, subject: str, kind: Kind, timeout: float, judge: Judge = judge_trial
) -> bool:
    """Whether a trial is right under a setting: nothing that fails is found.

    Args:
        setting: The setting.
        trial: A trial that goes wrong without it.
        subject: Its wrong result.
        kind: The kind of its finding.
        timeout: Seconds.
        judge: Judges one trial.
    """
    options = trial.options.model_copy(
        update={"compiler_options": {**trial.options.compiler_options, **setting.patches}}
    )
    findings = judge(replace(trial, options=options), timeout)
    return findings is not None and not any(found.kind.fails for found in findings)
