"""The layers divide over the pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.layout import Layout, layout_of, stages_fit
from rllaunch.doctor.numbers import either, flag_with, nearest, plural
from rllaunch.doctor.rules.groups import PP, is_megatron_like
from rllaunch.resolve.origins import Resolved

FIRST = "trainer.decoder_first_pipeline_num_layers"
LAST = "trainer.decoder_last_pipeline_num_layers"
FLAG = "--decoder-last-pipeline-num-layers"
LAYERS = "model.architecture.num_hidden_layers"
# Options of Megatron that cut the layers another way.
OWN_LAYOUT = {
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
}


def _check(resolved: Resolved) -> Iterator[Finding]:
    layout = layout_of(resolved)
    own = OWN_LAYOUT & set(resolved.config.megatron.model_extra or {})
    if own or not is_megatron_like(resolved) or "RL316" not in layout.broken():
        return
    given = [key for key, count in ((FIRST, layout.first), (LAST, layout.last)) if count is not None]
    if layout.pp == 1:
        yield RULE.error(
            resolved,
            "a first or last stage of its own size needs more than one pipeline stage",
            [*given, PP],
            " ".join(f"--set {key}=unset" for key in given),
        )
        return
    assert layout.layers is not None, "stages of an unknown number of layers break nothing"
    inside = layout.layers - (layout.first or 0) - (layout.last or 0)
    stages = layout.pp - len(given)
    ends = "".join(f" − {count}" for count in (layout.first, layout.last) if count is not None)
    left = f"{layout.layers}{ends} = {inside} layers" if ends else plural(inside, "layer")
    over = plural(stages, "pipeline stage") + (" beside the ends" if ends else "")
    yield RULE.error(
        resolved,
        f"{left} cannot be divided over {over}",
        [LAYERS, PP, *given],
        either(layout.fix("RL316", "pp"), _other_ends(layout)) or "choose stages that divide the layers",
    )


def _other_ends(layout: Layout) -> str:
    """The most even cut with a last stage of its own size, beside the first one that is given."""
    assert layout.layers is not None, "the caller knows the layers"
    fitting = [n for n in range(1, layout.layers) if stages_fit(layout.layers, layout.pp, layout.first, n)]
    even = layout.layers // layout.pp
    best = min(fitting, key=lambda n: abs(n - even), default=None)
    if layout.last is not None and fitting:
        return flag_with(FLAG, nearest(fitting, layout.last))
    return flag_with(FLAG, [best] if best else [])


RULE = Rule(
    code="RL316",
    name="layers divide over the pipeline stages",
    reason="Megatron builds equal stages between the first and the last and refuses the rest after bring-up; "
    "PP = 1 forbids custom ends (Megatron-core, transformer config)",
    check=_check,
    overridable=True,
)
RULES = (RULE,)
