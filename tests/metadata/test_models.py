"""Clean models: whatever is reported is looked at by a person, and either fixed here or kept as known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import checked_backend as cb
from checked_backend.backends import debug_interpreter
from checked_backend.findings import Finding, Verdict
from tests.support.metadata_models import MODELS
from tests.support.more_models import HUGGING_FACE, WRITTEN_HERE

# finding -> why it is real: torch's own metadata is wrong there
KNOWN: dict[tuple[str, str], str] = {
    ("aten.copy.default", "structure.offset"): (
        "Whisper writes to x[:, 1:]. The kernel keeps the offset of the tensor that it copies into; of a view that was "
        "made while tracing, the fake kernel says 0. torch.ops.aten.copy(x[:, 1:], y) alone shows it."
    ),
    ("aten.native_layer_norm_backward.default", "structure.stride"): (
        "torch computes this metadata with a decomposition that keeps the input's strides (a transposed picture in "
        "Segformer); the kernel returns a contiguous gradient. The operator alone shows it."
    ),
}
DEFAULT = ("bert", "resnet_channels_last", "recurrent")


def tensors(value: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(dict(value) if hasattr(value, "keys") else value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def train(name: str, *, dynamic: bool) -> tuple[list[Finding], cb.Report]:
    """Two training steps and one of inference, each of another batch size and length."""
    model, inputs = MODELS[name]()
    compiled = torch.compile(model, backend=debug_interpreter, dynamic=dynamic, options={"on_divergence": "record"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with cb.collect() as session:
        for batch, length in ((2, 8), (3, 10)) if dynamic else ((2, 8), (2, 8)):
            optimizer.zero_grad()
            loss = sum(out.float().square().mean() for out in tensors(compiled(**inputs(batch, length))))
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            compiled(**inputs(4, 12) if dynamic else inputs(2, 8))
    report = session.report
    return [f for f in report.findings if (f.op or "", f.detail) not in KNOWN and not f.evidence["inherited"]], report


@pytest.mark.more
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in MODELS]
)
def test_a_clean_model_has_no_mismatch_in_dynamic_training(name: str) -> None:
    findings, report = train(name, dynamic=True)
    assert findings == [], "\n".join(finding.message for finding in findings)
    checked = report.coverage.checked
    assert {"nodes of the forward graph", "nodes of the backward graph", "nodes of the inference graph"} <= set(checked)
    assert report.verdict in (Verdict.PASS, Verdict.FAIL)
    assert not [skip for skip in report.coverage.skipped if skip.matters]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*HUGGING_FACE, *WRITTEN_HERE])
def test_a_clean_model_has_no_mismatch_in_a_step_with_its_loss(name: str) -> None:
    case = {**HUGGING_FACE, **WRITTEN_HERE}[name]()
    compiled = torch.compile(case.model.train(), backend=debug_interpreter, options={"on_divergence": "record"})
    with cb.collect() as session:
        case.loss(compiled(**case.inputs)).backward()
    found = [finding for finding in session.report.findings if not finding.evidence["inherited"]]
    assert [finding.message for finding in found if (finding.op or "", finding.detail) not in KNOWN] == []
