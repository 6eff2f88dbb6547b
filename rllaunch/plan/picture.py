"""Memory plans as pictures: bytes per region over the steps, on the GPU above and on the host below.

`draw` writes a figure for a page or a talk, `in_terminal` the same in letters and blocks. Both know
nothing of how a plan came about: they show bytes, limits and the step that breaks one.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rllaunch.errors import EnvironmentProblem, UsageError
from rllaunch.installing import extra
from rllaunch.plan.handoff import TIERS, Tier
from rllaunch.units import SHOWN_UNITS, gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Group
    from rich.text import Text

TIER_NAMES: Mapping[Tier, str] = {"gpu": "GPU", "host": "host"}

# A hue per owner: blue the engines', orange the trainer's. Neighbours of one hue differ in lightness by
# enough for grey print, and blue beside orange is the pair that every kind of colour blindness tells apart.
COLOURS: Mapping[str, str] = {
    "static": "#b3b3b3",
    "params": "#8c2d04",
    "optimizer": "#d94801",
    "grads": "#fd8d3c",
    "activations": "#fdd0a2",
    "weights": "#08519c",
    "kv_cache": "#4a98d0",
    "cuda_graph": "#a6d0ec",
    "update_bucket": "#3d3d46",
    "arena": "#00695c",
}
OTHER_COLOURS = ("#26a69a", "#80cbc4", "#7a7a52", "#b5b58a")
TRAINER_REGIONS = ("params", "optimizer", "grads", "activations")
ENGINE_REGIONS = ("weights", "kv_cache", "cuda_graph")
BREAK = "#c2003f"
CHOSEN = "#00695c"


@dataclass(frozen=True)
class StepPicture:
    """One step of a plan.

    Args:
        gpu: region → bytes on the fullest GPU, at the step's fullest moment.
        host: region → bytes on the fullest host, at the step's fullest moment.
    """

    phase: Literal["init", "cycle"]
    name: str
    gpu: Mapping[str, int]
    host: Mapping[str, int]


@dataclass(frozen=True)
class PlanPicture:
    """One way to run the handoff: its steps and the limits they are held against.

    Args:
        gpu_limit, host_limit: in bytes; None where nothing limits.
        first_break: index in `steps` of the first that breaks a limit.
        is_chosen: this is the plan the launch takes.
    """

    title: str
    steps: Sequence[StepPicture]
    gpu_limit: int | None
    host_limit: int | None
    first_break: int | None
    is_chosen: bool

    def limit(self, tier: Tier) -> int | None:
        return self.gpu_limit if tier == "gpu" else self.host_limit

    def regions(self, tier: Tier) -> list[Mapping[str, int]]:
        return [step.gpu if tier == "gpu" else step.host for step in self.steps]

    def totals(self, tier: Tier) -> list[int]:
        return [sum(regions.values()) for regions in self.regions(tier)]

    def excess(self, tier: Tier) -> int:
        """Bytes by which the first breaking step exceeds the limit of this tier; 0 if it does not."""
        limit = self.limit(tier)
        if self.first_break is None or limit is None:
            return 0
        return max(0, self.totals(tier)[self.first_break] - limit)


# Both drawings


def _present_regions(plans: Iterable[PlanPicture]) -> list[str]:
    """Regions that hold anything anywhere, from the bottom of the stack to its top."""
    seen = {
        region
        for plan in plans
        for tier in TIERS
        for step in plan.regions(tier)
        for region, nbytes in step.items()
        if nbytes > 0
    }
    return [region for region in COLOURS if region in seen] + sorted(seen - set(COLOURS))


def _colours(regions: Sequence[str]) -> dict[str, str]:
    others = [region for region in regions if region not in COLOURS]
    spare = {region: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, region in enumerate(others)}
    return {region: COLOURS.get(region) or spare[region] for region in regions}


def _unit(nbytes: float) -> tuple[str, int]:
    """The unit in which a scale that ends at `nbytes` has few digits."""
    for name, size, least in SHOWN_UNITS:
        if nbytes >= max(2, least) * size:
            return name, size
    return "B", 1


def _scale_end(plans: Iterable[PlanPicture], tier: Tier) -> int:
    """Bytes that a scale shared by the plans has to reach.

    A limit that would squeeze all bars into the lowest fifth is left off the scale.
    """
    plans = list(plans)
    peak = max((total for plan in plans for total in plan.totals(tier)), default=0)
    limits = [limit for plan in plans if (limit := plan.limit(tier)) is not None]
    return max([peak, *(limit for limit in limits if limit <= 5 * peak)], default=0) or max(limits, default=0) or 1


def _excess_text(plan: PlanPicture, tier: Tier) -> str:
    assert plan.first_break is not None, "only a plan that breaks a limit exceeds one"
    return f"exceeds by {gib(plan.excess(tier))} in {plan.steps[plan.first_break].name}"


# A figure


def draw(heading: str, plans: Sequence[PlanPicture], path: Path) -> None:
    """Write the plans side by side as one figure, as SVG or PNG by the suffix of `path`.

    Raises:
        UsageError: another suffix.
        EnvironmentProblem: matplotlib is not installed, or the file cannot be written.
    """
    if path.suffix.lower() not in (".svg", ".png"):
        raise UsageError(
            what=f"cannot draw a plan as {path.suffix or 'a file without a suffix'}: .svg and .png can be written",
            where=str(path),
            fix=f"{path.with_suffix('.svg')} or {path.with_suffix('.png')}",
        )
    try:
        import matplotlib
    except ImportError as err:
        raise EnvironmentProblem(
            what="drawing a plan needs matplotlib, which is not installed", fix=extra("plot")
        ) from err
    assert plans, "there is a plan to draw"
    # Text stays text in an SVG: it can be searched and edited, and the salt makes equal plans equal files.
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "rllaunch",
        "hatch.linewidth": 1.2,
        "font.family": "sans-serif",
    }
    with matplotlib.rc_context(style):
        figure = _figure(heading, plans)
        try:
            figure.savefig(path, dpi=250, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as err:
            raise EnvironmentProblem(
                what=f"the picture cannot be written: {err.strerror or err}", where=str(path)
            ) from err


def _figure(heading: str, plans: Sequence[PlanPicture]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    most_steps = max(len(plan.steps) for plan in plans)
    # 4 plans of 22 steps are what 12.8 inches hold; more of them make a larger sheet of the same shape.
    sheet = max(1.0, (len(plans) * most_steps / 92) ** 0.5 if len(plans) > 4 or most_steps > 30 else 1.0)
    layout = ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.07, wspace=0.0, hspace=0.02)
    figure = Figure(figsize=(12.8 * sheet, 7.2 * sheet), layout=layout, facecolor="white")
    figure.suptitle(
        textwrap.fill(heading, int(95 * sheet)), x=0.008, ha="left", fontsize=15, fontweight="bold", color="#1a1a1a"
    )
    column_inches = 11.6 * sheet / len(plans)
    regions = _present_regions(plans)
    grid = figure.subplots(2, len(plans), sharex="col", sharey="row", squeeze=False)
    for row, tier in enumerate(TIERS):
        for column, plan in enumerate(plans):
            is_last = column == len(plans) - 1
            names_limit = is_last or plans[column + 1].limit(tier) != plan.limit(tier)
            _draw_panel(grid[row][column], plan, tier, regions, column_inches)
            _draw_limit(grid[row][column], plan, tier, _scale_end(plans, tier), names_limit)
            _draw_peak(grid[row][column], plan, tier, _scale_end(plans, tier))
        _set_scale(grid[row][0], plans, tier, column_inches)
    for column, plan in enumerate(plans):
        _caption(grid[0][column], plan, column_inches)
        _name_steps(grid[1][column], plan, column_inches)
    _legend(figure, regions, plans)
    return figure


def _positions(plan: PlanPicture) -> list[float]:
    """Where each step's bar stands: one apart, start-up and cycle a little further."""
    positions, x = [], 0.0
    for index, step in enumerate(plan.steps):
        if index and step.phase != plan.steps[index - 1].phase:
            x += 0.7
        positions.append(x)
        x += 1.0
    return positions


def _draw_panel(axes: Axes, plan: PlanPicture, tier: Tier, regions: Sequence[str], column_inches: float) -> None:
    colours = _colours(regions)
    positions, totals = _positions(plan), plan.totals(tier)
    bottoms = [0.0] * len(plan.steps)
    for region in regions:
        heights = [float(step.get(region, 0)) for step in plan.regions(tier)]
        if any(heights):
            axes.bar(
                positions, heights, 0.88, bottoms, color=colours[region], edgecolor="white", linewidth=0.4, zorder=2
            )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    if plan.excess(tier):
        assert plan.first_break is not None
        axes.bar(
            positions[plan.first_break],
            totals[plan.first_break],
            0.96,
            facecolor="none",
            edgecolor=BREAK,
            linewidth=2.2,
            zorder=5,
        )
        axes.text(
            0.012,
            0.975,
            textwrap.fill(_excess_text(plan, tier), max(12, int(column_inches * 13.3))),
            transform=axes.transAxes,
            va="top",
            color=BREAK,
            fontsize=8.5,
            fontweight="bold",
            zorder=8,
        )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#888888")
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", labelsize=8.5, colors="#444444", length=0)
    axes.tick_params(axis="x", length=0)
    _shade_start_up(axes, plan, positions)


def _draw_limit(axes: Axes, plan: PlanPicture, tier: Tier, scale_end: int, names_limit: bool) -> None:
    """A dashed line at the limit, and hatching over whatever stands above it."""
    limit, totals = plan.limit(tier), plan.totals(tier)
    if limit is None:
        return
    over = [(x, total - limit) for x, total in zip(_positions(plan), totals, strict=True) if total > limit]
    if over:
        axes.bar(
            [x for x, _ in over],
            [excess for _, excess in over],
            0.88,
            limit,
            facecolor="#ffffff88",
            edgecolor=BREAK,
            hatch="////",
            linewidth=0,
            zorder=4,
        )
    if limit > scale_end:
        if names_limit:
            axes.text(
                0.988,
                0.975,
                f"limit {gib(limit)}, off this scale",
                transform=axes.transAxes,
                va="top",
                ha="right",
                fontsize=8.5,
                color="#1a1a1a",
            )
        return
    axes.axhline(limit, color="#1a1a1a", linewidth=1.3, linestyle=(0, (5, 3)), zorder=6)
    if names_limit:
        axes.annotate(
            f"limit\n{gib(limit)}",
            (1.0, limit),
            xycoords=axes.get_yaxis_transform(),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color="#1a1a1a",
            annotation_clip=False,
        )


def _draw_peak(axes: Axes, plan: PlanPicture, tier: Tier, scale_end: int) -> None:
    """The highest bar's value, right above it, or above the limit if the line would cross it."""
    positions, totals, limit = _positions(plan), plan.totals(tier), plan.limit(tier) or 0
    peak = max(totals, default=0)
    if not peak:
        return
    x = positions[totals.index(peak)]
    # Near an edge the text leans inwards, so that a narrow panel does not push it into its neighbour.
    side = "left" if x < 0.15 * positions[-1] else "right" if x > 0.85 * positions[-1] else "center"
    axes.annotate(
        f"peak {gib(peak)}",
        (
            x + {"left": -0.45, "right": 0.45, "center": 0.0}[side],
            limit if 0 <= limit - peak < 0.13 * scale_end else peak,
        ),
        xytext=(0, 4),
        textcoords="offset points",
        ha=side,
        va="bottom",
        fontsize=8.5,
        fontweight="bold",
        color="#1a1a1a",
        bbox={"boxstyle": "square,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        zorder=7,
    )


def _shade_start_up(axes: Axes, plan: PlanPicture, positions: Sequence[float]) -> None:
    if not positions:
        return
    start_up = [x for x, step in zip(positions, plan.steps, strict=True) if step.phase == "init"]
    axes.set_xlim(-0.7, positions[-1] + 0.7)
    if start_up:
        axes.axvspan(-0.7, start_up[-1] + 0.85, color="#f1f1ee", linewidth=0, zorder=0)


def _set_scale(axes: Axes, plans: Sequence[PlanPicture], tier: Tier, column_inches: float) -> None:
    """One scale for a row of panels, with room above the bars for what is written there."""
    end = _scale_end(plans, tier)
    unit, size = _unit(end)
    has_text = any(plan.excess(tier) or (plan.limit(tier) or 0) > end for plan in plans)
    is_narrow = column_inches < 4
    axes.set_ylim(0, end * ((1.42 if is_narrow else 1.32) if has_text else 1.16))
    ticks = _round_steps(end / size)
    axes.set_yticks([tick * size for tick in ticks], [f"{tick:g}" for tick in ticks])
    name = "GPU memory" if tier == "gpu" else "host RAM"
    axes.set_ylabel(f"{name}, {unit}", fontsize=10, color="#1a1a1a")


def _round_steps(end: float) -> list[float]:
    """About five round numbers from 0 up to `end`."""
    rough = end / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.99)
    return [round(index * step, 9) for index in range(int(end / step) + 1)]


def _caption(axes: Axes, plan: PlanPicture, column_inches: float) -> None:
    """Above a column: the plan's title, whether it is taken and whether it fits; the names of the phases."""
    exceeded: list[Tier] = [tier for tier in TIERS if plan.excess(tier)]
    if plan.first_break is not None:
        places = {"gpu": "on the GPU", "host": "in host RAM"}
        verdict = " ".join(["does not fit", " and ".join(places[tier] for tier in exceeded)]).strip()
    else:
        verdict = "fits" if plan.gpu_limit is not None or plan.host_limit is not None else "no limit given"
    verdict = f"✓ chosen, {verdict}" if plan.is_chosen else verdict
    colour = BREAK if plan.first_break is not None else CHOSEN if plan.is_chosen else "#666666"
    title = textwrap.fill(plan.title, max(12, int(column_inches * 10.5)))
    weight = "bold" if plan.is_chosen else "normal"
    above: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "va": "bottom",
        "annotation_clip": False,
    }
    axes.annotate(title, (0, 1), xytext=(0, 33), fontsize=11.5, fontweight="bold", color="#1a1a1a", **above)
    axes.annotate(verdict, (0, 1), xytext=(0, 18), fontsize=9.5, fontweight=weight, color=colour, **above)
    phases = {"init": "start-up", "cycle": "cycle"}
    positions = _positions(plan)
    for phase, name in phases.items():
        own = [x for x, step in zip(positions, plan.steps, strict=True) if step.phase == phase]
        if own:
            # Start-up may be a single narrow bar: its name then reaches over the cycle's, which is written further in.
            is_first = own[0] == 0
            x = -0.7 if is_first else max((own[0] + own[-1]) / 2, own[0] + 1.5)
            axes.annotate(
                name,
                (x, 1),
                xytext=(0, 3),
                textcoords="offset points",
                xycoords=axes.get_xaxis_transform(),
                ha="left" if is_first else "center",
                va="bottom",
                fontsize=8.5,
                color="#666666",
                annotation_clip=False,
            )


def _name_steps(axes: Axes, plan: PlanPicture, column_inches: float) -> None:
    positions = _positions(plan)
    points_each = 72 * column_inches * 0.9 / (len(positions) + 2)
    is_wide = points_each > 42
    axes.set_xticks(
        positions,
        [step.name for step in plan.steps],
        rotation=35 if is_wide else 90,
        ha="right" if is_wide else "center",
        rotation_mode="anchor" if is_wide else "default",
        fontsize=max(5.0, min(9.0, points_each * 0.85)),
    )
    axes.tick_params(axis="x", length=0, pad=3, colors="#1a1a1a")
    if plan.first_break is not None:
        label = axes.get_xticklabels()[plan.first_break]
        label.set_color(BREAK)
        label.set_fontweight("bold")


def _legend(figure: Figure, regions: Sequence[str], plans: Sequence[PlanPicture]) -> None:
    """One legend below everything, in the order of the owners."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colours = _colours(regions)
    handles: list[Patch | Line2D] = [Patch(facecolor=colours[region], label=region) for region in regions]
    if any(plan.limit(tier) is not None for plan in plans for tier in TIERS):
        handles.append(Line2D([], [], color="#1a1a1a", linewidth=1.3, linestyle=(0, (5, 3)), label="limit"))
    if any(plan.first_break is not None for plan in plans):
        handles.append(Patch(facecolor="white", edgecolor=BREAK, hatch="////", label="over the limit"))
    # A handle takes 0.37 inch, a letter 0.074: as many rows as that asks for, evenly filled.
    inches = sum(0.37 + 0.074 * len(str(handle.get_label())) for handle in handles)
    rows = math.ceil(inches / (figure.get_figwidth() - 0.2))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=math.ceil(len(handles) / rows),
        frameon=False,
        fontsize=9.5,
        handlelength=1.3,
        handleheight=1.0,
        columnspacing=1.3,
        handletextpad=0.5,
    )


# A terminal

# Written where a region begins in a bar, so that it is known without colour.
LETTERS: Mapping[str, str] = {
    "static": "S",
    "params": "P",
    "optimizer": "O",
    "grads": "G",
    "activations": "A",
    "weights": "W",
    "kv_cache": "K",
    "cuda_graph": "C",
    "update_bucket": "U",
    "arena": "R",
}
FILL = {**dict.fromkeys(TRAINER_REGIONS, "▓"), **dict.fromkeys(ENGINE_REGIONS, "▒"), "static": "░"}
OVER = "╳"
LIMIT = "┃"


@dataclass(frozen=True)
class _Bars:
    """How bars of one tier are drawn: one scale and one unit for all plans."""

    tier: Tier
    cells: int
    scale_end: int
    colours: Mapping[str, str]
    letters: Mapping[str, str]

    def cells_of(self, nbytes: int) -> int:
        return round(self.cells * nbytes / self.scale_end)

    def bar(self, regions: Mapping[str, int], limit: int | None) -> Text:
        """A stacked bar of exactly `cells` + 1 characters, the limit's mark among them."""
        from rich.text import Text

        cells = [*self._stack(regions), *[(" ", "")] * self.cells][: self.cells]
        total = sum(regions.values())
        if limit is None or limit > self.scale_end:
            cells.append((" ", ""))
        else:
            mark = self.cells_of(limit)
            if total > limit:
                mark = min(mark, self.cells - 1)
                last = max(self.cells_of(total), mark + 1)
                cells[mark:last] = [(OVER, f"bold {BREAK}")] * (last - mark)
            else:
                # Rounding must not let a bar that fits reach over the mark.
                cells[mark:] = [(" ", "")] * (self.cells - mark)
            cells.insert(mark, (LIMIT, "bold"))
        return Text.assemble(*cells)

    def _stack(self, regions: Mapping[str, int]) -> list[tuple[str, str]]:
        cells: list[tuple[str, str]] = []
        filled = 0
        for region, letter in self.letters.items():
            nbytes = regions.get(region, 0)
            filled += nbytes
            count = self.cells_of(filled) - len(cells)
            if not nbytes or not count:
                continue
            colour = self.colours[region]
            cells.append((letter, f"bold {_readable_on(colour)} on {colour}"))
            cells += [(FILL.get(region, "█"), f"{colour} on {colour}")] * (count - 1)
        return cells


def in_terminal(plans: Sequence[PlanPicture], width: int) -> Group:
    """The plans one below the other: a stacked bar per step and tier, its total, the limit's mark.

    Every line is at most `width` characters (at least 50 are needed).
    """
    from rich.console import Group
    from rich.text import Text

    regions = _present_regions(plans)
    colours, letters = _colours(regions), _letters(regions)
    name_width = min(max((len(step.name) for plan in plans for step in plan.steps), default=0), width - 40)
    # Two marks before the name; per tier a space, the bar, the limit's mark, and a total of 7.
    cells = max(4, (width - 2 - name_width - 2 * 9) // 2)
    bars = [_Bars(tier, cells, _scale_end(plans, tier), colours, letters) for tier in TIERS]
    lines: list[Text] = []
    for plan in plans:
        lines += [*_plan_lines(plan, bars, name_width, width), Text()]
    return Group(*lines, *_legend_lines(regions, colours, letters, width))


def _letters(regions: Sequence[str]) -> dict[str, str]:
    """A letter for each region; one that has none gets the first that is free, of its own name if possible."""
    letters: dict[str, str] = {}
    free = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
    for letter in (LETTERS[region] for region in regions if region in LETTERS):
        free.remove(letter)
    for region in regions:
        letter = LETTERS.get(region) or next((c for c in [*region.upper(), *free] if c in free), "?")
        letters[region] = letter
        if letter in free:
            free.remove(letter)
    return letters


def _plan_lines(plan: PlanPicture, bars: Sequence[_Bars], name_width: int, width: int) -> list[Text]:
    from rich.text import Text

    mark = "✓ " if plan.is_chosen else "  "
    lines = [Text.assemble((f"{mark}{plan.title}", "bold"), (" (chosen)" if plan.is_chosen else "", CHOSEN))]
    head = Text(f"  {'':{name_width}}", style="dim")
    for drawn in bars:
        unit, _ = _unit(drawn.scale_end)
        limit = plan.limit(drawn.tier)
        name, cells = TIER_NAMES[drawn.tier], drawn.cells + 1
        ways = (
            []
            if limit is None
            else [f"{name}, limit {gib(limit)}", f"{name} limit {gib(limit)}", f"{name} ≤ {gib(limit)}"]
        )
        says = next((text for text in ways if len(text) <= cells), name[:cells])
        head.append(f" {says:{cells}}{unit:>7}")
    lines.append(head)
    phase = ""
    for index, step in enumerate(plan.steps):
        if step.phase != phase:
            phase = step.phase
            lines.append(Text(f"  {'start-up' if phase == 'init' else 'cycle'}", style="dim"))
        lines.append(_step_line(plan, index, bars, name_width))
    lines += [_verdict_line(plan)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _step_line(plan: PlanPicture, index: int, bars: Sequence[_Bars], name_width: int) -> Text:
    from rich.text import Text

    step = plan.steps[index]
    breaks = index == plan.first_break
    name = step.name if len(step.name) <= name_width else step.name[: name_width - 1] + "…"
    line = Text(f"{'✗' if breaks else ' '} {name:{name_width}}", style=f"bold {BREAK}" if breaks else "")
    for drawn in bars:
        regions = plan.regions(drawn.tier)[index]
        total = sum(regions.values())
        limit = plan.limit(drawn.tier)
        _, size = _unit(drawn.scale_end)
        line.append(" ", style="none")
        line.append_text(drawn.bar(regions, limit))
        is_over = limit is not None and total > limit
        line.append(f"{total / size:7.1f}", style=f"bold {BREAK}" if is_over else "none")
    return line


def _verdict_line(plan: PlanPicture) -> Text:
    from rich.text import Text

    peaks = ", ".join(f"{TIER_NAMES[tier]} {gib(max(plan.totals(tier), default=0))}" for tier in TIERS)
    if plan.first_break is None:
        return Text(f"  peak {peaks}")
    over = [f"{TIER_NAMES[tier]} {_excess_text(plan, tier)}" for tier in TIERS if plan.excess(tier)]
    said = "; ".join(over) or f"a limit breaks in {plan.steps[plan.first_break].name}"
    return Text(f"✗ {said}", style=f"bold {BREAK}")


def _legend_lines(
    regions: Sequence[str], colours: Mapping[str, str], letters: Mapping[str, str], width: int
) -> list[Text]:
    """What each letter means, as many to a line as fit."""
    from rich.text import Text

    entries = [(letters[r], f"bold {_readable_on(colours[r])} on {colours[r]}", r) for r in regions]
    entries += [(LIMIT, "bold", "limit"), (OVER, f"bold {BREAK}", "over the limit")]
    lines = [Text(" ")]
    for letter, style, name in entries:
        if len(lines[-1]) + len(name) + 3 > width and len(lines[-1]) > 1:
            lines.append(Text(" "))
        lines[-1].append_text(Text.assemble(" ", (letter, style), f" {name}"))
    return lines


def _readable_on(colour: str) -> str:
    """Black or white, whichever reads on a colour given as #rrggbb (weights of ITU-R BT.601)."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
