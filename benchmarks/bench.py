"""`make bench`: how fast the parts a user waits for are, each as a ratio measured in one run.

    python benchmarks/bench.py [--json FILE] [start] [loop] [memory]

Start-up is compared with a bare Typer application in the same environment, alternating; the loop's own
overhead with its step; moved bytes with a plain memory copy on the same machine. Numbers from a busy
machine are noisy: quote ratios and medians.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RUNS = 9
BARE_APP = """
import typer
app = typer.Typer({options})
{commands}
app()
"""
COMMANDS = "\n".join(f"@app.command()\ndef c{i}(x: int = 1): 'One line of help.'" for i in range(6))


# A user's second start finds compiled modules (a machine that forbids writing them would time the compiler), and no
# guest: the example plugin is installed for the tests.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {
    "RLLAUNCH_DISABLE_PLUGINS": "example"
}


def seconds(command: Sequence[str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT, check=False)
    elapsed = time.perf_counter() - started
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout.decode()}"
    return elapsed


def alternating(commands: dict[str, Sequence[str]], runs: int = RUNS) -> dict[str, float]:
    """Median seconds of each command, run in turn so that a change of the machine's load hits all alike."""
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(runs + 1):
        for name, command in commands.items():
            elapsed = seconds(command)
            if turn:  # the first turn fills the caches
                taken[name].append(elapsed)
    return {name: statistics.median(values) for name, values in taken.items()}


def start_up() -> dict[str, Any]:
    """`--help`, `resolve` and `doctor --no-probe` against a bare Typer application's `--help`."""
    cli = str(Path(sys.executable).with_name("rllaunch"))
    launch = ("--model", "dsv4", "--hardware", "GB300")
    with tempfile.TemporaryDirectory() as scratch:
        plain, rich = Path(scratch, "app_plain.py"), Path(scratch, "app_rich.py")
        plain.write_text(BARE_APP.format(options="rich_markup_mode=None", commands=COMMANDS))
        rich.write_text(BARE_APP.format(options="", commands=COMMANDS))
        median = alternating(
            {
                "rllaunch --help": (cli, "--help"),
                "bare typer --help, plain": (sys.executable, str(plain), "--help"),
                "bare typer --help, with rich": (sys.executable, str(rich), "--help"),
                "rllaunch resolve": (cli, "resolve", *launch),
                "rllaunch doctor --no-probe": (cli, "doctor", "--no-probe", *launch),
            }
        )
    return {
        **{name: f"{value * 1000:.0f} ms" for name, value in median.items()},
        "--help / bare plain": round(median["rllaunch --help"] / median["bare typer --help, plain"], 2),
        "--help / bare with rich": round(median["rllaunch --help"] / median["bare typer --help, with rich"], 2),
    }


def loop() -> dict[str, Any]:
    """The loop's own share of a step of `tiny`: the step without generate, train and update."""
    cli = str(Path(sys.executable).with_name("rllaunch"))
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch, "run")
        command = (
            cli,
            "train",
            "--model",
            "tiny",
            "--hardware",
            "cpu",
            "--num-rollout",
            "60",
            "--run-dir",
            str(run_dir),
        )
        seconds((*command, "--eval-interval", "0", "--save-interval", "0"))
        rows = [json.loads(line)["seconds"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()][10:-1]
    step = statistics.median(r["step"] for r in rows)
    parts = {k: statistics.median(r[k] for r in rows) for k in ("generate", "train", "update_weights", "handoff")}
    own = statistics.median(r["step"] - r["generate"] - r["train"] - r["update_weights"] for r in rows)
    return {
        "step": f"{step * 1000:.1f} ms",
        **{k: f"{v * 1000:.1f} ms" for k, v in parts.items()},
        "own overhead": f"{own * 1000:.1f} ms",
        "own overhead / step": round(own / step, 4),
        "a whole run of tiny (150 rollouts)": f"{150 * step:.0f} s of loop time",
    }


def memory() -> dict[str, Any]:
    """Bytes a second of a handoff of 256 MiB in the embedded pools, as a share of a plain copy of as many bytes."""
    import torch

    from rllaunch.backends.embedded.host_copies import OwnCopies
    from rllaunch.backends.embedded.pool import FlatBuffer, Pool

    torch.set_num_threads(1)
    nbytes, rounds = 256 * 2**20, 7
    with tempfile.TemporaryDirectory() as scratch:
        device = Pool.create(Path(scratch, "device-0.ledger"), "device-0", None)
        host = Pool.create(Path(scratch, "host-0.ledger"), "host-0", None)
        buffer = FlatBuffer(device, "trainer-0", "params", nbytes)
        buffer.allocate()
        copies = OwnCopies(host, "trainer-0", {"params": nbytes}, is_retained=True)
        source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
        taken: dict[str, list[float]] = {"offload": [], "onload": [], "memcpy": [], "memcpy to new pages": []}

        def timed(name: str, call: Callable[[], Any]) -> None:
            started = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - started)

        def offload() -> None:
            copies.store("params", buffer.bytes)
            buffer.free()

        def onload() -> None:
            buffer.allocate()
            copies.restore("params", buffer.bytes)

        for _ in range(rounds):
            timed("memcpy", lambda: target.copy_(source))
            timed("memcpy to new pages", lambda: torch.empty(nbytes, dtype=torch.uint8).copy_(source))
            timed("offload", offload)
            timed("onload", onload)
        buffer.free()
    speed = {name: nbytes / statistics.median(values[1:]) / 1e9 for name, values in taken.items()}
    return {
        **{name: f"{value:.1f} GB/s" for name, value in speed.items()},
        # An onload allocates the device buffer anew, as a GPU's allocator would; its pages are new.
        "offload / memcpy": round(speed["offload"] / speed["memcpy"], 2),
        "onload / memcpy to new pages": round(speed["onload"] / speed["memcpy to new pages"], 2),
    }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"start": start_up, "loop": loop, "memory": memory}


def main(words: Sequence[str]) -> None:
    wanted = [w for w in words if w in PARTS] or list(PARTS)
    results: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.1f}"
    }
    for name in wanted:
        results[name] = PARTS[name]()
        print(f"\n{name}")
        for label, value in results[name].items():
            print(f"  {label:<34} {value}")
    print(f"\n{results['machine']}")
    if "--json" in words:
        Path(words[list(words).index("--json") + 1]).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # rllaunch alone: what a guest's module costs at import is the guest's.
    os.environ.setdefault("RLLAUNCH_DISABLE_PLUGINS", "example")
    main(sys.argv[1:])
