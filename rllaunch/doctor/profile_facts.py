"""Whether what a hardware profile states can be: units, the memory of the GPU it names, the link's generation.

Nothing here asks a machine. The figures are what a GPU's maker gives; what a driver shows lies a little below or above.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rllaunch.doctor.finding import Finding, Level
from rllaunch.resolve.links import link_bytes_per_second, reached_bytes_per_second, why_unknown
from rllaunch.resolve.origins import show_value
from rllaunch.resolve.profiles import Profile, Value
from rllaunch.units import gib

GB, GIB, TIB = 10**9, 2**30, 2**40
# Codes of `rllaunch profiles check`; all of them are the configuration's (exit code 3).
CODES = {
    "RL600": "a profile's file cannot be used (`profiles check`)",
    "RL601": "a profile sets a key or a value that the configuration does not take (`profiles check`)",
    "RL602": "a profile extends what is not there, or itself (`profiles check`)",
    "RL603": "a hardware profile leaves out what a plan needs (`profiles check`)",
    "RL604": "a fact cannot be: its unit, the GPU's memory, the link's generation (`profiles check`)",
    "RL605": "a fact's source is still to be filled in (`profiles check`)",
    "RL606": "a launch with the profile does not resolve (`profiles check`)",
    "RL607": "a launch with the profile cannot be planned (`profiles check`)",
    "RL608": "a profile's choice breaks a rule by itself (`profiles check`)",
    "RL609": "two profiles recognise the same GPUs (`profiles check`)",
}


@dataclass(frozen=True)
class Board:
    """A GPU as it is sold.

    Args:
        gb: its memory in the vendor's GB, for each size there is.
        host_bytes: most host RAM a GPU has where its HBM looks like host RAM too; None elsewhere.
    """

    gb: tuple[int, ...]
    host_bytes: int | None = None


# The words by which a profile's names tell the board; of several the longest counts.
BOARDS: Mapping[str, Board] = {
    "V100": Board((16, 32)),
    "A100": Board((40, 80)),
    "A100-40GB": Board((40,)),
    "A800": Board((40, 80)),
    "A40": Board((48,)),
    "A6000": Board((48,)),
    "H100": Board((80, 94, 96)),
    "H800": Board((80,)),
    "H20": Board((96, 141)),
    "H200": Board((141,)),
    "B200": Board((180, 192)),
    "B300": Board((270, 288)),
    "GH200": Board((96, 144), host_bytes=480 * GIB),
    "GB200": Board((186, 192), host_bytes=240 * GIB),
    "GB300": Board((278, 288), host_bytes=240 * GIB),
    "VR": Board((288,)),
    "L4": Board((24,)),
    "L20": Board((48,)),
    "L40": Board((48,)),
    "L40S": Board((48,)),
    "3090": Board((24,)),
    "RTX 3090": Board((24,)),
    "RTX 4090": Board((24, 48)),
    "RTX 5090": Board((32,)),
    "RTX PRO 6000": Board((96,)),
    "MI250X": Board((128,)),
    "MI300A": Board((128,)),
    "MI300X": Board((192,)),
    "MI308X": Board((192,)),
    "MI325X": Board((256,)),
    "MI350X": Board((288,)),
    "MI355X": Board((288,)),
}
# A driver shows up to 7 % less than the vendor's decimal GB (B200), and at most as many GiB (A100).
SHOWN = (0.9 * GB, 1.0 * GIB)

# Below this share of its link a copy is not what pinned memory gives.
SLOW = 0.3

# What a number may have been meant as, where it is out of range: the factor to bytes, and its name.
UNITS = ((1024, "KiB (as /proc/meminfo's kB)"), (2**20, "MiB"), (GIB, "GiB"), (GB, "GB"), (TIB, "TiB"), (10**12, "TB"))
RATES = ((10**6, "MB/s"), (GB, "GB/s"), (10**12, "TB/s"))


def check_facts(profile: Profile, own: Profile, base: Profile | None = None) -> Iterator[Finding]:
    """What cannot be in the facts of a hardware profile.

    Args:
        profile: with what it extends merged in.
        own: as it stands in its file; what a base states is the base's to answer for.
        base: what it extends, with what that extends merged in.
    """
    facts = _Facts(profile, own, base)
    yield from facts.sources()
    if profile.values.get("hardware.accelerator", Value("cpu", "")).value == "cpu":
        yield from facts.of_cpu()
        return
    yield from facts.missing()
    yield from facts.gpus()
    yield from facts.gpu_memory()
    yield from facts.host_memory()
    yield from facts.link()
    yield from facts.speeds()


class _Facts:
    def __init__(self, profile: Profile, own: Profile, base: Profile | None) -> None:
        self.profile, self.own, self.base = profile, own, base

    def get(self, key: str) -> Any:
        found = self.profile.values.get(f"hardware.{key}")
        return found.value if found else None

    def number(self, key: str) -> float | None:
        """A fact that is one; RL601 speaks of others."""
        value = self.get(key)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None

    def say(self, code: str, level: Level, message: str, keys: tuple[str, ...], fix: str) -> Finding:
        values = ((f"hardware.{key}", self.profile.values.get(f"hardware.{key}")) for key in keys)
        lines = tuple(f"{key} = {show_value(v.value)}   {v.place}   {v.fact_source}".rstrip() for key, v in values if v)
        return Finding(code, level, message, lines or (self.own.origin,), fix)

    def sources(self) -> Iterator[Finding]:
        unsourced = {k: v for k, v in self.own.values.items() if v.fact_source.strip().upper().startswith("TODO")}
        if unsourced:
            lines = [f"{k} = {show_value(v.value)}   {v.place}   {v.fact_source}" for k, v in unsourced.items()]
            text = f"the source of {len(lines)} fact{'s' if len(lines) > 1 else ''} is still to be filled in"
            fix = 'write [profile] source, or { value = …, source = "…" }: measured when and on what, or whose page'
            yield Finding("RL605", "error", text, tuple(lines), fix)
        elif self.own.source.strip().upper().startswith("TODO"):
            text = "the source in [profile] is still to be filled in; no fact refers to it"
            fix = "state where this machine differs under [facts], or write why nothing does as the source"
            where = f"profile.source = {show_value(self.own.source)}   {self.own.origin}"
            yield Finding("RL605", "warning", text, (where,), fix)

    def of_cpu(self) -> Iterator[Finding]:
        if stated := [k for k in ("gpu_memory_bytes", "host_link") if self.get(k)]:
            fix = 'accelerator = "cuda" or "rocm" under [facts], or take out what speaks of GPUs'
            keys = ("accelerator", *stated)
            is_said = self.get("accelerator") is not None
            text = "a machine without GPUs has facts about them" if is_said else "no accelerator is stated"
            yield self.say("RL603", "error", text, keys, fix)
        elif not self.get("accelerator"):
            fix = 'accelerator = "cuda", "rocm" or "cpu" under [facts], or extends a profile that says it'
            yield self.say("RL603", "error", "no accelerator is stated", (), fix)

    def missing(self) -> Iterator[Finding]:
        needed: tuple[tuple[str, Level, str], ...] = (
            ("gpus_per_node", "error", "every layout is counted from it"),
            ("gpu_memory_bytes", "error", "no plan can say whether anything fits"),
            ("host_memory_bytes", "info", "plans have no limit on the host"),
            ("host_link_bytes_per_second", "info", f"the seconds of a plan are those of {self._assumed_link()}"),
        )
        for key, level, why in needed:
            if self.get(key) is None:
                fix = "state it under [facts]; what `rllaunch profiles new` writes says how to find it out"
                yield self.say("RL603", level, f"{key} is not stated: {why}", (), fix)

    def _assumed_link(self) -> str:
        link = self.get("host_link")
        reached = reached_bytes_per_second(link) if isinstance(link, str) else None
        return f"{reached[0] / 1e9:.1f} GB/s, {reached[1]}" if reached else "PCIe Gen4"

    def gpus(self) -> Iterator[Finding]:
        count = self.number("gpus_per_node")
        if count and count > 16:
            text = f"{count:g} GPUs in one node: a node is what one operating system runs"
            yield self.say("RL604", "error", text, ("gpus_per_node",), "of a rack of trays give the GPUs of one tray")

    def board(self) -> tuple[str, Board] | None:
        """The GPU that the profile's own names tell, else those of what it extends."""
        found = next((found for words, _ in self._words() if (found := _board_in(words))), None)
        return (found, BOARDS[found]) if found else None

    def _words(self) -> Iterator[tuple[str, bool]]:
        """What may name the GPU, and whether another profile says it."""
        for profile in (self.own, self.profile):
            yield " ".join((profile.name, *profile.aliases, *profile.gpu_names)), profile is not self.own
            yield profile.extends, True

    def _names_another(self) -> str:
        """What to do where the GPU is that of the profile which this one extends; empty where it is its own."""
        if not next((is_theirs for words, is_theirs in self._words() if _board_in(words)), False):
            return ""
        return f'if this is another GPU than {self.own.extends}\'s, say so: gpu_names = ["…"] under [detect]'

    def gpu_memory(self) -> Iterator[Finding]:
        key = "gpu_memory_bytes"
        nbytes, found = self.number(key), self.board()
        if nbytes is None:
            return
        if found is None:
            if not 4 * GIB <= nbytes <= TIB:
                yield self._out_of_range(key, nbytes, lambda n: 4 * GIB <= n <= TIB, "no GPU has so much or so little")
            return
        name, board = found

        def fits(n: float) -> bool:
            return any(SHOWN[0] * gb <= n <= SHOWN[1] * gb for gb in board.gb)

        sizes = " or ".join(str(gb) for gb in board.gb)
        if not fits(nbytes):
            count = self.number("gpus_per_node") or 1
            if count > 1 and fits(nbytes / count):
                text = f"{gib(nbytes)} is the memory of all {count:g} GPUs together: a {name} has {sizes} GB"
                yield self.say("RL604", "error", text, (key, "gpus_per_node"), f"{key} = {int(nbytes / count)}")
            else:
                said = self._out_of_range(key, nbytes, fits, f"a {name} has {sizes} GB")
                if another := self._names_another():
                    said = replace(said, fix=f"{another}; {said.fix}" if "meant?" in said.fix else another)
                yield said
        elif nbytes % GB == 0:
            text = f"{nbytes / GB:g} GB exactly, the vendor's decimal: a driver shows another number"
            fix = "the MiB of `nvidia-smi --query-gpu=memory.total --format=csv` × 1048576, where there is one to ask"
            yield self.say("RL604", "info", text, (key,), fix)

    def host_memory(self) -> Iterator[Finding]:
        key = "host_memory_bytes"
        nbytes, gpu = self.number(key), self.number("gpu_memory_bytes")
        if nbytes is None:
            return
        if not 8 * GIB <= nbytes <= 64 * TIB:
            yield self._out_of_range(key, nbytes, lambda n: 8 * GIB <= n <= 64 * TIB, "no node with GPUs has that")
            return
        if gpu and nbytes < gpu and 4 * GIB <= gpu <= TIB:
            text = f"the host has {gib(nbytes)}, less than one GPU ({gib(gpu)}): next to nothing can be moved to it"
            fix = "state what a whole node's job may use, not one process's share"
            yield self.say("RL604", "warning", text, (key, "gpu_memory_bytes"), fix)
        found, count = self.board(), self.number("gpus_per_node") or 1
        if found and found[1].host_bytes and nbytes > found[1].host_bytes * count:
            most = gib(found[1].host_bytes * count)
            text = f"{gib(nbytes)} of host RAM counts the HBM: {count:g} × {found[0]} have {most} of their own at most"
            fix = "leave out the NUMA nodes that have no CPU, as `rllaunch profiles detect` does"
            yield self.say("RL604", "error", text, (key, "gpus_per_node"), fix)

    def link(self) -> Iterator[Finding]:
        text, key = self.get("host_link"), "host_link_bytes_per_second"
        rate = self.number(key)
        carries = link_bytes_per_second(text) if isinstance(text, str) else None
        if isinstance(text, str) and carries is None and (wrong := why_unknown(text)):
            fix = 'write it as "PCIe Gen5 x16" (Gen3 to Gen7) or "NVLink-C2C", so that its speed can be checked'
            yield self.say("RL604", "warning", wrong, ("host_link",), fix)
        if rate is not None and carries is None and not GB <= rate <= 2e12:
            yield self._rate_out_of_range(key, rate, lambda r: GB <= r <= 2e12, "no link to a host is like that")
        if rate is not None and carries is not None:
            yield from self._against(key, rate, carries)
        yield from self._of_another_link()

    def _of_another_link(self) -> Iterator[Finding]:
        """A speed that is inherited beside a link that is not: it is the other link's."""
        link, key = "hardware.host_link", "hardware.host_link_bytes_per_second"
        if self.base is None or link not in self.own.values or key in self.own.values or key not in self.base.values:
            return
        theirs = self.base.values.get(link)
        if theirs is None or theirs.value == self.get("host_link"):
            return
        text = f"the link's speed is still that of {self.own.extends}, whose link is {theirs.value}"
        fix = "state host_link_bytes_per_second too: `rllaunch profiles detect --measure` on the machine"
        if reached := reached_bytes_per_second(str(self.get("host_link"))):
            fix += f", or {toml_rate(reached[0])} ({reached[1]})"
        yield self.say("RL604", "warning", text, ("host_link", "host_link_bytes_per_second"), fix)

    def _against(self, key: str, rate: float, carries: float) -> Iterator[Finding]:
        """A link's speed against what its generation carries."""
        keys, text, most = ("host_link", key), self.get("host_link"), f"{carries / 1e9:.1f} GB/s"
        if carries * 1.01 < rate <= carries * 2.02:
            why = f"{rate / 1e9:.1f} GB/s are both directions together: one way {text} carries {most}"
            yield self.say("RL604", "error", why, keys, f"state one direction, such as {key} = {toml_rate(rate / 2)}")
        elif not 0.01 * carries <= rate <= carries * 1.01:
            why = f"{text} carries {most} one way"
            yield self._rate_out_of_range(key, rate, lambda r: SLOW * carries <= r <= carries * 1.01, why)
        elif rate < SLOW * carries:
            why = f"{rate / carries:.0%} of the {most} that {text} carries: pageable memory, or fewer lanes?"
            fix = "measure with pinned memory, one GPU at a time: `rllaunch profiles detect --measure`"
            yield self.say("RL604", "warning", why, keys, fix)

    def speeds(self) -> Iterator[Finding]:
        for key, low, high in (
            ("hbm_bytes_per_second", 1e11, 5e13),
            ("gpu_link_bytes_per_second", GB, 1e13),
            ("host_pin_bytes_per_second", 1e8, 1e12),
        ):
            rate = self.number(key)
            if rate is not None and not low <= rate <= high:
                yield self._rate_out_of_range(key, rate, lambda r, a=low, b=high: a <= r <= b, "no such memory or link")  # type: ignore[misc]
        hbm, link = self.number("hbm_bytes_per_second"), self.number("host_link_bytes_per_second")
        if hbm and link and link > hbm >= 1e11:
            keys = ("hbm_bytes_per_second", "host_link_bytes_per_second")
            text = "the host's memory is reached faster than the GPU's own"
            yield self.say("RL604", "error", text, keys, "have the two changed places?")

    def _out_of_range(self, key: str, nbytes: float, fits: Callable[[float], bool], why: str) -> Finding:
        return self._meant(key, nbytes, fits, why, UNITS, "bytes")

    def _rate_out_of_range(self, key: str, rate: float, fits: Callable[[float], bool], why: str) -> Finding:
        return self._meant(key, rate, fits, why, RATES, "bytes per second")

    def _meant(
        self,
        key: str,
        number: float,
        fits: Callable[[float], bool],
        why: str,
        units: tuple[tuple[int, str], ...],
        unit: str,
    ) -> Finding:
        text = f"{key} is in {unit}, and {number:,.0f} cannot be: {why}"
        for factor, name in units:
            if fits(number * factor):
                as_bytes = f"{int(number * factor)}" if unit == "bytes" else toml_rate(number * factor)
                return self.say("RL604", "error", text, (key,), f"were {name} meant? {key} = {as_bytes}")
        return self.say("RL604", "error", text, (key,), "`rllaunch profiles new` says how to find it out")


def toml_rate(rate: float) -> str:
    return f"{rate / 1e12:.4g}e12" if rate >= 1e12 else f"{rate / 1e9:.4g}e9"


def _board_in(words: str) -> str | None:
    """The board that the words name; of several the one with the longest name."""
    return max((name for name in BOARDS if _contains(words, name)), key=len, default=None)


def _contains(text: str, words: str) -> bool:
    """Whole words, whatever stands between them: `RTX-PRO-6000` has `RTX PRO 6000`."""
    pattern = r"[\W_]*".join(map(re.escape, re.split(r"[\W_]+", words)))
    return re.search(rf"(?<![^\W_]){pattern}(?![^\W_])", text, re.IGNORECASE) is not None
