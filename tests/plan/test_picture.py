"""Plans as pictures: what a reader finds in the SVG, the PNG and the terminal."""

from __future__ import annotations

import io
import math
import re
import struct
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rllaunch.errors import EnvironmentProblem, UsageError
from rllaunch.plan.picture import PlanPicture, StepPicture, draw, in_terminal

GIB = 2**30
INIT = ("trainer.init", "trainer.offload", "engine.onload_weights", "engine.onload_kv")
CYCLE = ("generate", "engine.offload_kv", "trainer.onload", "train", "trainer.offload", "update_weights", "eval")
ENGINE = {"weights": 30, "kv_cache": 70, "cuda_graph": 4}
TRAINER = {"params": 12, "optimizer": 48, "grads": 24}


def step(phase: str, name: str, unit: int, extra: Mapping[str, int]) -> StepPicture:
    awake = TRAINER if name in ("trainer.init", "trainer.onload", "train") else ENGINE
    asleep = {} if awake is TRAINER else {"params": 12, "optimizer": 48}
    gpu = {region: n * unit for region, n in {"static": 3, **awake, **extra}.items()}
    host = {region: n * unit for region, n in {"static": 20, "object_store": 8, **asleep}.items()}
    return StepPicture("init" if phase == "init" else "cycle", name, gpu, host)


def plan(unit: int = GIB, repeat: int = 1, gpu_limit: int | None = 130, host_limit: int | None = 200) -> PlanPicture:
    """A plan whose fullest GPU step is `train` with 3 + 84 + 40 = 127 units; the host holds 88."""
    steps = [step("init", name, unit, {}) for name in INIT]
    steps += [step("cycle", n, unit, {"activations": 40} if n == "train" else {}) for n in CYCLE * repeat]
    return PlanPicture(
        title="cpu order, mirror, retained",
        steps=steps,
        gpu_limit=None if gpu_limit is None else gpu_limit * unit,
        host_limit=None if host_limit is None else host_limit * unit,
        first_break=None,
        is_chosen=True,
    )


FITS = plan()
BREAKS = replace(plan(gpu_limit=120), title="gpu order, mirror, fresh", first_break=len(INIT) + 3, is_chosen=False)
REGIONS = {"static", "object_store", "activations", *ENGINE, *TRAINER}


def texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


def lines_of(plans: list[PlanPicture], width: int = 80, colour: bool = False) -> list[str]:
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(in_terminal(plans, width))
    return console.export_text(styles=colour).splitlines()


# The figure


@pytest.fixture
def matplotlib() -> None:
    pytest.importorskip("matplotlib")


@pytest.mark.usefixtures("matplotlib")
def test_the_svg_says_in_words_what_a_reader_looks_for(tmp_path: Path) -> None:
    draw("Eight GPUs", [FITS, BREAKS], tmp_path / "plan.svg")
    found = texts(tmp_path / "plan.svg")
    assert set(found) >= REGIONS | set(INIT) | set(CYCLE)
    for expected in ("Eight GPUs", FITS.title, BREAKS.title, "start-up", "cycle", "GPU memory, GiB", "host RAM, GiB"):
        assert expected in found
    assert {"✓ chosen, fits", "does not fit on the GPU", "exceeds by 7.0 GiB in train"} <= set(found)
    assert "130.0 GiB" in " ".join(found)
    assert "120.0 GiB" in " ".join(found), "plans with limits of their own name both"
    assert found.count("peak 127.0 GiB") == 2
    assert found.count("static") == 1, "one legend for all panels"


@pytest.mark.usefixtures("matplotlib")
def test_the_png_is_sixteen_to_nine_and_fine_enough_for_a_slide(tmp_path: Path) -> None:
    draw("Eight GPUs", [FITS], tmp_path / "plan.png")
    head = (tmp_path / "plan.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    assert width >= 1600
    assert width * 9 == height * 16


@pytest.mark.usefixtures("matplotlib")
def test_equal_plans_are_equal_files(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw("Eight GPUs", [FITS, BREAKS], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize(("unit", "name"), [(2**20, "MiB"), (2**30, "GiB"), (2**40, "TiB")])
def test_the_unit_follows_the_numbers(unit: int, name: str, tmp_path: Path) -> None:
    draw("", [plan(unit)], tmp_path / "plan.svg")
    found = texts(tmp_path / "plan.svg")
    assert {f"GPU memory, {name}", f"host RAM, {name}", f"peak 127.0 {name}"} <= set(found)
    ticks = [float(text) for text in found if re.fullmatch(r"[\d.]+", text)]
    assert max(ticks) in (100, 150, 200)


@pytest.mark.usefixtures("matplotlib")
def test_a_limit_far_away_is_said_and_does_not_squeeze_the_bars(tmp_path: Path) -> None:
    draw("", [plan(gpu_limit=None, host_limit=2000)], tmp_path / "plan.svg")
    found = texts(tmp_path / "plan.svg")
    assert "limit 2000.0 GiB, off this scale" in found
    assert "2000" not in found
    draw("", [plan(gpu_limit=None, host_limit=None)], tmp_path / "none.svg")
    assert not any("limit" in text for text in texts(tmp_path / "none.svg") if text != "✓ chosen, no limit given")


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("repeat", [1, 3])
def test_no_two_labels_lie_on_each_other(count: int, repeat: int) -> None:
    """Every text that is drawn, against every other, in pixels; ticks and limits too."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    from rllaunch.plan.picture import _figure

    broken = replace(BREAKS, steps=plan(repeat=repeat).steps)
    figure = _figure("A heading of some length over all of the panels", [broken, *[plan(repeat=repeat)] * (count - 1)])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    shown = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    shown = [text for text in shown if text.axes is None or _drawn(text)]
    boxes = [text.get_window_extent(renderer).padded(-1) for text in shown]
    assert len(shown) > 20
    for index, (text, box) in enumerate(zip(shown, boxes, strict=True)):
        assert figure.bbox.contains(box.x0, box.y0), text
        assert figure.bbox.contains(box.x1, box.y1), text
        for other, other_box in zip(shown[index + 1 :], boxes[index + 1 :], strict=True):
            angle = text.get_rotation()
            if angle % 90 and other.get_rotation() == angle:
                # Boxes of slanted neighbours overlap, their lines do not while they are this far apart.
                apart = abs(other_box.x1 - box.x1) * math.sin(math.radians(angle))
                assert apart > text.get_fontsize() * figure.dpi / 72, (text, other)
            else:
                assert not box.overlaps(other_box), (text, other)


def _drawn(text: object) -> bool:
    """Tick labels that a shared axis hides are still in the tree."""
    axes = text.axes  # type: ignore[attr-defined]
    ticks = [*axes.xaxis.get_ticklabels(which="both"), *axes.yaxis.get_ticklabels(which="both")]
    return text not in ticks or text in [
        tick.label1 for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_major_ticks() if tick.label1.get_visible()
    ]


def test_another_suffix_is_refused_with_the_two_that_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.jpg: \.svg and \.png can be written") as caught:
        draw("", [FITS], tmp_path / "plan.jpg")
    assert caught.value.fix == f"{tmp_path / 'plan.svg'} or {tmp_path / 'plan.png'}"


@pytest.mark.usefixtures("matplotlib")
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="No such file or directory") as caught:
        draw("", [FITS], tmp_path / "nowhere" / "plan.svg")
    assert caught.value.where == (str(tmp_path / "nowhere" / "plan.svg"),)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EnvironmentProblem) as caught:
        draw("", [FITS], tmp_path / "plan.svg")
    assert caught.value.fix == "`pip install -e '.[plot]'` in the clone of rllaunch"


def test_the_module_alone_imports_neither_matplotlib_nor_rich() -> None:
    script = """
        import sys
        import rllaunch.plan.picture
        print(sorted({"matplotlib", "rich", "torch"} & set(sys.modules)))
    """
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n" + textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# The terminal


@pytest.mark.parametrize("width", [80, 100, 141, 200])
@pytest.mark.parametrize("unit", [2**20, 2**30, 2**40])
def test_no_line_is_wider_than_the_terminal(width: int, unit: int) -> None:
    plans = [plan(unit), replace(BREAKS, title="a title " * 40)]
    lines = lines_of(plans, width)
    assert max(map(len, lines)) <= width
    assert max(map(len, lines)) > width - 4, "the bars use the room there is"


def test_every_step_has_a_line_and_the_breaking_one_is_marked() -> None:
    lines = lines_of([BREAKS])
    shown = [line[2:].split()[0] for line in lines if line[2:].split() and line[2:].split()[0] in INIT + CYCLE]
    assert shown == [*INIT, *CYCLE]
    (marked,) = (line for line in lines if line.startswith("✗ ") and "┃" in line)
    assert marked.split()[1] == "train"
    assert "╳" in marked
    assert "127.0" in marked
    assert [line for line in lines if "exceeds" in line] == ["✗ GPU exceeds by 7.0 GiB in train"]


def test_a_plan_that_fits_has_no_mark_of_one_that_does_not() -> None:
    lines = lines_of([FITS])
    assert not any(line.startswith("✗") or ("╳" in line and "over the limit" not in line) for line in lines)
    assert lines[0].startswith("✓ cpu order, mirror, retained (chosen)")
    assert "  peak GPU 127.0 GiB, host 88.0 GiB" in [line.rstrip() for line in lines]


def test_letters_tell_regions_apart_without_colour() -> None:
    lines = lines_of([FITS], 160)
    (train,) = (line for line in lines if line.startswith("  train "))
    bar = train[2 + len("engine.onload_weights") : 90].partition("┃")[0]
    letters = re.sub(r"[^A-Z]", "", bar)
    assert letters == "SPOGA"
    legend = " ".join(lines[-3:])
    for named in ("S static", "P params", "O optimizer", "G grads", "A activations", "W weights", "B object_store"):
        assert named in legend


def test_a_bar_is_as_long_as_its_bytes() -> None:
    """With a scale that ends at the limit, half the limit is half the bar."""
    steps = [StepPicture("cycle", "half", {"params": 50}, {}), StepPicture("cycle", "full", {"params": 100}, {})]
    half, full = (
        re.search(r"P▓*", line).group()  # type: ignore[union-attr]
        for line in lines_of([PlanPicture("", steps, 100, None, None, False)], 120)
        if line.strip().startswith(("half", "full"))
    )
    assert len(full) > 30
    assert abs(2 * len(half) - len(full)) <= 1


def test_a_byte_over_the_limit_shows_and_a_byte_below_does_not() -> None:
    under = StepPicture("cycle", "under", {"params": 10**12 - 1}, {})
    over = StepPicture("cycle", "over", {"params": 10**12 + 1}, {})
    lines = lines_of([PlanPicture("", [under, over], 10**12, None, 1, False)])
    assert [("╳" in line) for line in lines if line[2:].startswith(("under", "over ")) and "┃" in line] == [False, True]


def test_the_break_stands_out_in_colour() -> None:
    coloured = "\n".join(lines_of([BREAKS], colour=True))
    assert "\x1b[1;38;2;194;0;63m" in coloured
