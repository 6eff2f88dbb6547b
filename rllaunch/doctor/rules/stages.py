"""The layers divide over the pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.layout import Layout, layout_of, stages_fit
from rllaunch.doctor.numbers import architecture_key, either, flag_with, nearest, plural
from rllaunch.doctor.rules.groups import PP, is_megatron_like
from rllaunch.resolve.origins import Resolved

FIRST = "trainer.decoder_first_pipeline_num_layers"
LAST = "trainer.decoder_last_pipeline_num_layers"
FLAG = "--decoder-last-pipeline-num-layers"
LAYERS = "num_hidden_layers"
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
    yield RULE.error(
        resolved,
        _what(layout.layers, layout.pp, [n for n in (layout.first, layout.last) if n is not None]),
        [architecture_key(resolved.config, LAYERS), PP, *given],
        either(layout.fix("RL316", "pp"), _other_ends(layout)) or "choose stages that divide the layers",
    )


def _what(layers: int, stages: int, ends: list[int]) -> str:
    inside, between = layers - sum(ends), stages - len(ends)
    if not ends:
        return f"{plural(layers, 'layer')} cannot be divided over {stages} pipeline stages"
    if between <= 0:
        sizes = " + ".join(str(n) for n in ends)
        return f"the model has {layers} layers, its {stages} pipeline stages hold {sizes} = {sum(ends)}"
    left = " − ".join(str(n) for n in (layers, *ends)) + f" = {inside} layers"
    return f"{left} cannot be divided over {plural(between, 'pipeline stage')} beside the ends"


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
